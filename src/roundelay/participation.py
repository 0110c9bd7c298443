"""How a learner takes part: its transport, its membership, and what it does when learners come and go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from roundelay.agreement import agreement_of, check_agreement, check_shards_agree, take_first_weights
from roundelay.clock import Steps
from roundelay.cluster.environment import World, init
from roundelay.cluster.membership import Membership
from roundelay.elastic import ElasticGroup, Result
from roundelay.errors import DroppedError, MembershipChangedError, StrategyError, described
from roundelay.step_times import StepTimes
from roundelay.strategies.base import Strategy
from roundelay.training_state import TrainingState
from roundelay.transport.base import LEFT, Transport
from roundelay.weights import Replica
from roundelay.weights.shards import ShardGroup

log = logging.getLogger("roundelay")

CHANGES = (ConnectionError, MembershipChangedError)  # errors after which the learners of an elastic run meet and go on


class Participation:
    """One learner's part in a run of fixed size, or in an elastic run.

    Runs the hooks of the strategy. In an elastic run, a hook that fails because a learner has come or gone makes this learner
    connect again; then the hook runs once more.

    Args:
        strategy: the strategy of the learner.
        state: what a learner that joins receives.
        world: the world of the learner; by default `init()`, unless `transport` is given.
        transport: the connection to the peers; by default that of the world.
        membership: the learners that take part; by default all of the transport's.
        shards: the processes that hold the module in shards, if FSDP2 has sharded it.

    Attributes:
        times: seconds that the hooks of the strategy have waited and worked.
        joined: this learner joined a run under way.
        finished: this learner takes no more steps.
    """

    replica: Replica
    transport: Transport
    membership: Membership

    def __init__(
        self,
        strategy: Strategy,
        state: TrainingState,
        *,
        world: World | None,
        transport: Transport | None,
        membership: Membership | None,
        shards: ShardGroup | None,
    ) -> None:
        self.strategy, self._state, self._shards = strategy, state, shards
        self.times = StepTimes()
        self._membership_lock = threading.Lock()  # peers are lost in threads of the transport
        self._attached = self._closed = self._ready = self.joined = self.finished = False
        self._void = False  # the current step changes nothing: its gradient was dropped
        self._behind = 0  # steps to take without peers, until this learner has caught up with them
        self._group: ElasticGroup | None = None
        self._agreed = membership is not None
        self._world = world or (None if transport else init())
        if self._world is not None and self._world.client is not None:
            self._group = _elastic_group(self._world, state, strategy, shards)
            self.joined = self._world.client.joining
        else:
            self.transport = transport or _transport(self._world, shards)
            self.membership = membership or Membership.of(self.transport.size)

    @property
    def elastic(self) -> bool:
        """Whether learners may come and go."""
        return self._group is not None

    def begin(self, module: nn.Module, replica: Replica) -> None:
        """Agree with the other learners, take the first weights, and attach the strategy."""
        self._module, self.replica = module, replica
        if self._group is not None:
            self._enter(self._group)
        elif not self._agreed:
            if self._shards:
                check_shards_agree(self.strategy, self.transport)
            check_agreement(module, self.strategy, self.transport, self.membership.living)
            take_first_weights(module, self.transport, self.membership.living)
        self._attach()

    def _attach(self) -> None:
        """Give the strategy the current transport and weights."""
        members = self.membership  # read before a loss is reported: all learners must begin with one mixing
        self.transport.on_lost(self.peer_lost)
        self.transport.on_silent(self._peer_silent)
        if self._group is not None and self.strategy.synchronous:
            self.strategy.begin_at(self._state.steps)
        self.strategy.attach(self.replica, self.transport, members)
        self._attached = True
        for peer, reason in self.transport.lost.items():  # lost before the strategy could be told
            self.strategy.peer_lost(peer, reason)
        self.replica.mark()
        if self._group is not None:
            self._group.follow(self)

    # Steps ---------------------------------------------------------------------------------------------------------------

    @property
    def steps_alone(self) -> bool:
        """Whether the current step is taken without the peers: its gradient was dropped, or this learner catches up."""
        return self._void or self._behind > 0

    def check(self) -> None:
        """Raise an error if the membership has changed, or if a thread of the transport has failed."""
        if self._group is not None:
            self._group.check()
        self.transport.check()

    def run(self, begin: Callable[[], Steps]) -> None:
        """Run a hook of the strategy. If learners had to meet meanwhile, run it again, unless `steps_alone` is set."""
        while True:
            try:
                self.times.drive(begin())
                return
            except CHANGES as error:
                self.recover(error)
                if self.steps_alone:
                    return

    def end_step(self) -> None:
        """A step is over: count it, unless it was void, and run the hook after it."""
        if self._world is not None:
            self._world.steps.taken += 1
        if self._void:
            self._void = False
            return
        self._state.steps += 1
        self.times.steps += 1
        if self._behind:
            self._behind -= 1
            if not self._behind:
                self._attach()
            return
        try:
            self.times.drive(self.strategy.after_step())
        except CHANGES as error:
            self.recover(error)
            self._void = False  # the current gradient was already applied

    def finish(self) -> None:
        """Run the hook after the last step."""
        self.finished = True
        self.run(self.strategy.finish)

    def together(self, compute: Callable[[tuple[int, ...]], Result], timeout_s: float | None = None) -> Result:
        """The result of a collective of all living learners. The caller has let the strategy drain before."""
        group = self._group
        if group is None:
            return compute(self.membership.living)
        return self._until_all_are_there(lambda: group.together(compute, timeout_s))

    def gather(self, value: object) -> dict[int, Any]:
        """The values of all living learners of an elastic run, by id."""
        group = self._group
        assert group is not None
        return self._until_all_are_there(lambda: dict(group.gather(value).values))

    def _until_all_are_there(self, collective: Callable[[], Result]) -> Result:
        """The result of a collective. If learners had to meet meanwhile, it is tried again."""
        while True:
            try:
                return collective()
            except CHANGES as error:
                self.recover(error)
                if self._behind:
                    self._attach()
                self._void, self._behind = False, 0
                self.run(self.strategy.finish if self.finished else self.strategy.drain)

    # Peers that come and go ------------------------------------------------------------------------------------------------

    def recover(self, error: Exception) -> None:
        """Connect to the living learners again, if the run is elastic and the strategy cannot go on; else raise `error`."""
        dropped = isinstance(error, DroppedError)
        if self._group is None or (self.strategy.reforms_alone and not dropped):
            raise error
        log.warning("learner %d meets the others: %s", self.transport.rank, error)
        self._ready = not dropped
        if self._attached:
            self.strategy.abandon()
        self._attached = False
        self.transport.close(described(error))
        self._enter(self._group)
        if self._group.took_state:
            self._void = True
            for weight in self.replica.weights:
                weight.grad = None
        if not self._behind:
            self._attach()

    def _enter(self, group: ElasticGroup) -> None:
        assert self._world is not None
        agreement = agreement_of(self._module, self.strategy, self._world.size, self._world.local_size)
        steps = self._state.steps
        self.transport, newest = group.enter(self.strategy, ready=self._ready, steps=steps, agreement=agreement)
        self.membership, self._ready = group.view.membership, True
        self._behind = newest - self._state.steps

    def reform(self, membership: Membership) -> None:
        """Continue with these members. Any thread may call this."""
        self.strategy.reform(membership)
        with self._membership_lock:
            self.membership = membership

    def peer_lost(self, peer: int, reason: str) -> None:
        """Continue without `peer`. Any thread may call this."""
        with self._membership_lock:
            self.membership = self.membership.without(peer)
        level = logging.INFO if reason == LEFT else logging.WARNING
        log.log(level, "learner %d has lost learner %d: %s", self.transport.rank, peer, reason)
        if self._attached and not self._closed:  # the training thread may have given up because of this loss already
            self.strategy.peer_lost(peer, reason)

    def _peer_silent(self, peer: int, *, silent: bool) -> None:
        if self._attached and not self._closed:
            self.strategy.peer_silent(peer, silent=silent)

    def close(self, failure: str = "") -> None:
        """Leave the run. With a `failure`, the peers are told why."""
        self._closed = True
        if hasattr(self, "transport"):
            self.transport.close(failure)
        if self._group is not None and self._world is not None:
            self._world.close(failure)


def _transport(world: World | None, shards: ShardGroup | None) -> Transport:
    assert world is not None
    return (world if shards is None else world.between_nodes(shards.ranks)).transport()


def _elastic_group(world: World, state: TrainingState, strategy: Strategy, shards: ShardGroup | None) -> ElasticGroup:
    if shards is not None:
        raise StrategyError(
            "a module in shards (FSDP2) cannot take part in an elastic run: a node is several processes, which would have to "
            "come and go together. Start it with torchrun; a node that is lost is left out there, too"
        )
    assert world.client is not None
    assert world.endpoint is not None
    return ElasticGroup(world.client, world.endpoint, state, group_size=strategy.members_of_a_group(world.local_size))
