"""How one learner takes part in a run: its share, its position and its weights follow the membership."""

from __future__ import annotations

from dataclasses import replace

from roundelay.cluster.environment import World
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.elastic import ElasticGroup
from roundelay.meeting import Progress
from roundelay.strategies.base import Strategy
from roundelay.training.build import strategy_of
from roundelay.training.config import Config
from roundelay.training.data import Draws
from roundelay.training.partition import Partition
from roundelay.training.state import Resumed, State
from roundelay.transport.base import Transport


class Participation:
    """One learner's place in the run. `begin` comes first; then `meet` if `must_meet`, then `connect`, then steps.

    Args:
        config: of the run.
        samples: of the task.
        world: rank and size at the beginning.
        client: a connection to the rendezvous, where this learner has registered.
        group: the learners that train together.

    Attributes:
        strategy: only to read its properties; each connection has a new one.
        synchronous: whether learners wait for each other.
        reforms_alone: whether learners follow a changed membership without a meeting.
        world: rank and size at the moment.
        partition: the learner's part of the run at the moment.
        position: how far the learner is.
        began: whether this learner has taken part in any membership of this run.
    """

    def __init__(
        self, config: Config, samples: int, world: World, client: RendezvousClient, group: ElasticGroup
    ) -> None:
        self._config, self._samples, self._client, self._group = config, samples, client, group
        self.strategy = strategy_of(config, world.local_size)
        self.synchronous, self.reforms_alone = self.strategy.synchronous, self.strategy.reforms_alone
        self.world = world
        self.partition = self._partition()
        self.began = False

    def begin(self, resumed: Resumed, *, ready: bool) -> int:
        """Start where `resumed` says. `ready`: the weights of this learner belong to this run.

        Returns the samples that the run has seen.
        """
        self.position, self._used_before, self._saved = resumed.position, resumed.used, resumed.state
        self._ready = ready
        self._weight_steps = self.position.steps  # steps that the weights have seen
        self._agreed: Progress | None = None  # what the last meeting agreed on; None after `connect`
        self._draws_used = 0  # since this learner registered
        self._joined = False
        return self.position.skip_boundaries(len(resumed.used) if ready else self._client.given)

    @property
    def must_meet(self) -> bool:
        """Whether this learner must meet the others before it connects."""
        return not self.reforms_alone or not (self.began or self._client.joining)

    def meet(self) -> None:
        """Meet the other learners: at the beginning, and, if synchronous, after every change of the membership.

        The learners go on from the first chunk that is not known to be used by all learners. In lockstep all learners
        must have the same chunks, boundaries and learning rate. So every learner, also one that has just joined, takes
        the position that the meeting agreed on.
        """
        first = self.position.first_unconfirmed if self.began else self.position.done
        before = self._group.view.membership.living
        self._agreed = self._group.meet(Progress(self._ready, first, self._weight_steps))
        self._ready = self._ready or self._group.revived
        if self._group.view.membership.living != before:
            self._saved = None  # what the strategy has saved was for other members
        self._update_partition()
        if self.partition.lockstep:
            self.position.restart_at(self._agreed.first_unconfirmed)

    def join_again(self) -> int:
        """Register again after the other learners went on without this one. This learner then takes their weights.

        Returns the samples that the run has seen, if a shared cursor counts them.
        """
        if self._client.joining:
            self._group.join_later()
        else:
            self._group.rejoin()
        self._ready, self._joined = self._group.revived, True
        self._draws_used = 0
        if not self._ready:
            self.position.used = []
        self._update_partition()
        return self.position.skip_boundaries(self._client.given)

    def connect(self, strategy: Strategy) -> tuple[Transport, int, State | None]:
        """Connect to the learners of the view.

        Returns the transport, the number of steps that the weights have seen, and the saved state that is still to be
        restored.
        """
        transport = self._group.connect(strategy, ready=self._ready)
        self._joined, self._ready = self._joined or not self._ready, True
        if self._agreed is not None:
            self._weight_steps, self._agreed = self._agreed.weight_steps, None
        saved, self._saved = self._saved, None
        return transport, self._weight_steps, saved

    def draws(self) -> Draws:
        """The draws of this learner from here on."""
        return self.position.draws(
            self._client.budget, self._used_before, lambda: self._draws_used, joined=self._joined
        )

    def stepped(self) -> None:
        """Count a step: the weights include one more draw."""
        self._weight_steps += 1
        self._draws_used += 1

    def _update_partition(self) -> None:
        living = self._group.view.membership
        self.world = replace(self.world, rank=living.position(self._group.id), size=living.size)
        self.partition = self.position.partition = self._partition()

    def _partition(self) -> Partition:
        return Partition.of(self._config, self.world, self._samples, self._group.id, synchronous=self.synchronous)
