"""Delay-by-one: a global average that is used one step late, so that it overlaps with the next gradient."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError
from roundelay.strategies.base import Strategy
from roundelay.transport.base import Transport
from roundelay.weights import Flat, Replica


class DelayByOne(Strategy):
    r"""A global average of weights or gradients that is used one step late (arXiv:2110.11199).

    * `delayed="weights"`: $x_i \leftarrow \frac1n \sum_j x_j - \alpha g_i(x_i)$; the allreduce of the weights runs during
      forward and backward. A learner applies its own gradient at once; those of the other learners come one step late.
    * `delayed="gradients"`, the other reading in the literature: $x \leftarrow x - \alpha \frac1n \sum_j g_j(x_{k-1})$;
      all gradients come one step late, also the learner's own, and the first step applies a zero gradient.
      Not for a GradScaler with a fused optimizer, which unscales in its step.

    Waits for all learners. Learners may take unequal numbers of steps: those that have finished go on contributing their
    last weights (or zero gradients) until all have. Extra memory: one copy of the model for weights, two for gradients.
    """

    def __init__(self, delayed: Literal["weights", "gradients"] = "weights") -> None:
        if delayed not in ("weights", "gradients"):
            raise StrategyError(f"delayed must be 'weights' or 'gradients', got {delayed!r}")
        self.delayed = delayed
        self.mixes_weights = self.takes_groups = delayed == "weights"
        self.needs_equal_weights = delayed == "gradients"
        self._steps = 0
        self._restarted = False
        self._pending: list[Tensor] = []  # gradients: the sum under way, of the run that this one resumes

    def agreement(self, size: int, local_size: int) -> str:
        """What is summed: weights or gradients."""
        return super().agreement(size, local_size) + self.delayed

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Start the first average, of weights that are equal everywhere or of gradients that are zero."""
        super().attach(replica, transport, membership)
        self._sum = _Sum(replica)
        if self.delayed == "gradients":
            self._fresh = _Sum(replica)
        else:
            self._sum.read(replica.tensors())
        self._start(active=1.0)

    def _start(self, active: float) -> None:
        self._sum.active.fill_(active)
        self._reducing = [self.transport.all_reduce(part, self.membership.living) for part in self._sum.flat.parts]

    def before_step(self) -> Steps:
        """Bring in what was reduced during forward and backward."""
        yield from self._reducing
        if self.delayed == "gradients":
            for part, pending in zip(self._sum.flat.parts, self._pending, strict=False):
                part.copy_(pending)
            self._pending = []
            self._exchange_gradients()
            return
        if self._restarted:  # that sum was of the weights from before load_state_dict
            self._restarted = False
            self._sum.read(self.replica.tensors())
            self._start(active=1.0)
            yield from self._reducing
        if self._reducing:
            self._sum.divide(self.membership.size)
            self._reducing = []  # if this step raises, the next one must not divide again
        self._sum.write(self.replica.tensors())

    def _exchange_gradients(self) -> None:
        """g_k goes out, the mean of g_{k-1} takes its place."""
        gradients = self.replica.gradients()
        self._fresh.read(gradients)
        self._sum.divide(max(float(self._sum.active), 1.0))
        self._sum.write(gradients)
        self._sum, self._fresh = self._fresh, self._sum
        self._start(active=1.0)

    def after_step(self) -> Steps:
        """The new weights go out."""
        self._steps += 1
        if self.delayed == "weights":
            self._sum.read(self.replica.tensors())
            self._start(active=1.0)
        yield from ()

    def drain(self) -> Steps:
        """Wait for the sum under way, which belongs to the next step."""
        yield from self._reducing

    def finish(self) -> Steps:
        """Go on contributing until no learner is active."""
        while True:
            yield from self._reducing
            if float(self._sum.active) == 0:
                return
            if self.delayed == "weights":
                self._sum.read(self.replica.tensors())
            else:
                self._sum.flat.storage.zero_()
            self._start(active=0.0)

    def metrics(self) -> dict[str, float]:
        """Averages so far."""
        return {"rounds": self._steps}

    def state_dict(self) -> dict[str, Any]:
        """Once drained: the sum of gradients that the next step will apply; weights are sent again."""
        return {"pending": [part.clone() for part in self._sum.flat.parts] if self.delayed == "gradients" else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the weights that the module has now. All learners do so before their next step."""
        self._restarted, self._pending = True, list(state["pending"])


class _Sum:
    """A sum over learners: a buffer of the weights' shapes, and one more number that counts the active learners."""

    def __init__(self, replica: Replica) -> None:
        weights = replica.tensors()
        self.flat = Flat([*weights, weights[0].new_zeros(1)], on=weights[0].device)

    @property
    def active(self) -> Tensor:
        return self.flat.views[-1]

    def read(self, tensors: list[Tensor]) -> None:
        self.flat.read([*tensors, self.active])

    def write(self, tensors: list[Tensor]) -> None:
        self.flat.write([*tensors, self.active])

    def divide(self, count: float) -> None:
        for part in self.flat.parts:
            part.div_(count)
