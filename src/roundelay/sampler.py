"""ElasticSampler: batches from a budget that all learners share, so that every sample is used once an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from roundelay.chunks import Chunks
from roundelay.cluster.environment import World, init
from roundelay.errors import ConfigError, DroppedError


class ElasticSampler(Sampler[list[int]]):
    """A `batch_sampler` for a DataLoader, with or without workers.

        sampler = ElasticSampler(dataset, batch_size=32, epochs=10)
        loader = DataLoader(dataset, batch_sampler=sampler)
        with Learner(model, optimizer, ADPSGD()) as learner:
            for epoch in sampler.remaining_epochs():
                for x, y in loader:
                    ...

    In an elastic run the rendezvous gives every batch to the learner that asks next, so a fast learner gets more of them. The
    batches that a lost learner had not used in a step are given to others. The rendezvous may not have heard of the
    last step of that learner, so the batch of that step may be used twice. In a world of fixed size the batches are
    distributed by rank. The order of an epoch depends only on (seed, epoch).

    A batch counts as used when the Learner has taken the step. Batches that were drawn and not used, because the loop was left
    early or a step was skipped, come first in the next epoch.

    Args:
        dataset: what is sampled, or its length.
        batch_size: the largest number of samples in a batch; the sizes in an epoch differ by at most one.
        epochs: number of epochs in the whole run.
        seed: seed of the order; the same on all learners.
        batches_per_step: batches whose gradients are accumulated for one step.
        world: by default `init()`, from the environment.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        epochs: int = 1,
        seed: int = 0,
        *,
        batches_per_step: int = 1,
        world: World | None = None,
    ) -> None:
        length = dataset if isinstance(dataset, int) else len(dataset)
        for name, value in (("a dataset", length), ("a batch_size", batch_size), ("epochs", epochs)):
            if value < 1:
                raise ConfigError(f"ElasticSampler needs {name} of at least 1, got {value}")
        if batches_per_step < 1:
            raise ConfigError(f"batches_per_step must be at least 1, got {batches_per_step}")
        self._chunks = Chunks(length, batch_size, seed)
        self._total = epochs * self._chunks.per_epoch
        self.batches_per_step = batches_per_step
        self._world = init() if world is None else world
        self._share = iter(range(self._world.rank, self._total, self._world.size))  # in a world of fixed size
        self._used_before: set[int] = set()  # in an earlier part of the run, by any learner
        self._used: list[int] = []  # before this learner registered for the last time
        self._drawn: list[int] = []  # since then
        self._next: int | None = None  # drawn, and kept for the next epoch
        self._epoch: int | None = (
            None  # the last epoch whose batches an iteration may give; None: that of its first batch
        )
        self._left_over = 0  # batches drawn before the last registration that were still on their way to the loop
        self._registrations = self._steps_before = 0
        self._declared = False

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of one epoch, and those of earlier epochs that lost learners have left."""
        again = self._drawn[self._done() :] if self._world.steps.taken else []
        self._drawn = self._drawn[: len(self._drawn) - len(again)]
        for unused in again:
            self._drawn.append(unused)
            yield self._chunks.samples(unused)
        number = self._peek()
        if number is None:
            return
        first = number // self._chunks.per_epoch
        while number is not None and number // self._chunks.per_epoch <= (
            first if self._epoch is None else self._epoch
        ):
            self._next = None
            self._drawn.append(number)
            yield self._chunks.samples(number)
            number = self._peek()

    def __len__(self) -> int:
        """About how many batches this learner gets in an epoch, if all learners are equally fast."""
        client = self._world.client
        learners = self._world.size if client is None or client.view is None else client.view.membership.size
        return math.ceil(self._chunks.per_epoch / learners)

    def set_epoch(self, epoch: int) -> None:
        """Iterations give no batches of epochs after this one, until the next call; for loops that count epochs themselves."""
        self._epoch = epoch

    def remaining_epochs(self) -> Iterator[int]:
        """The epochs that still have batches; an epoch may come twice if a lost learner did not use all its batches.

        At the end of an elastic run with asynchronous steps this waits until no learner holds a batch that it has not used. If
        steps wait for other learners, it cannot wait: a learner without a batch finishes, which lets the others take their
        last step. So the last batch of a learner that is lost in that step may stay unused.
        """
        while True:
            outstanding = self._world.steps.taken > 0 and self._done() < len(self._drawn)
            patient = not self._world.steps.together
            number = self._drawn[self._done()] if outstanding else self._peek(patient=patient)
            if number is None:
                return
            yield number // self._chunks.per_epoch

    def state_dict(self) -> dict[str, Any]:
        """The batches that this learner has used, and those of the states it loaded. Every learner saves its own."""
        return {"total": self._total, "used": sorted([*self._used_before, *self._used, *self._drawn[: self._done()]])}

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Continue after the batches of these states. Each learner loads its own state; one may load others', too.

        Raises ConfigError if a state has another total number of batches, or if batches were drawn already.
        """
        if self._declared or self._drawn:
            raise ConfigError("load the state of an ElasticSampler before its first batch")
        if any(state["total"] != self._total for state in states):
            raise ConfigError(
                "this state is of a run with another number of batches: keep dataset, batch_size and epochs"
            )
        self._used_before = {number for state in states for number in state["used"]}

    def _done(self) -> int:
        """How many batches drawn since the last registration are part of the weights."""
        steps = self._world.steps.taken - self._steps_before
        return min(max(steps * self.batches_per_step - self._left_over, 0), len(self._drawn))

    def _peek(self, *, patient: bool = False) -> int | None:
        """The next batch, without using it up; None if none is left. `patient`: wait for batches given back."""
        if self._next is None:
            self._next = self._dealt() if self._world.client is None else self._asked(patient=patient)
        return self._next

    def _dealt(self) -> int | None:
        return next((number for number in self._share if number not in self._used_before), None)

    def _asked(self, *, patient: bool) -> int | None:
        client = self._world.client
        assert client is not None
        if client.registrations != self._registrations:
            done = self._done()
            self._left_over = len(self._drawn) - done
            self._used += self._drawn[:done]
            self._drawn = []
            self._registrations, self._steps_before = client.registrations, self._world.steps.taken
        try:
            if not self._declared:
                client.budget.declare(self._total, sorted(self._used_before))
                self._declared = True
            return client.budget.draw(self._world.rank, len(self._drawn), self._done(), patient=patient)
        except DroppedError:
            # The run goes on without this learner, which finds that out in its next step: there it joins again, and the step
            # changes nothing. So any batch will do.
            return self._drawn[-1] if self._drawn else 0
