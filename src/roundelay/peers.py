"""A learner's peers: the connection to them, and which of them take part."""

from __future__ import annotations

import logging
import threading

from torch import nn

from roundelay.agreement import agreement_of, check_agreement, check_shards_agree, take_first_weights
from roundelay.cluster.environment import World, init
from roundelay.cluster.membership import Membership
from roundelay.elastic import ElasticGroup
from roundelay.errors import StrategyError, described
from roundelay.strategies.base import Strategy
from roundelay.training_state import TrainingState
from roundelay.transport.base import LEFT, Transport
from roundelay.weights import Replica
from roundelay.weights.shards import ShardGroup

log = logging.getLogger("roundelay")


class Peers:
    """The peers of one learner, in a run of fixed size or in an elastic run. Tells the strategy when one is lost.

    Args:
        strategy: the strategy of the learner.
        state: what a learner that joins receives.
        world: the world of the learner; by default `init()`, unless `transport` is given.
        transport: the connection to the peers; by default that of the world.
        membership: the learners that take part; by default all of the transport's.
        shards: the processes that hold the module in shards, if FSDP2 has sharded it.

    Attributes:
        world: the world of the learner; None if only a transport was given.
        group: the learners of an elastic run, which may come and go; None in a run of fixed size.
        joined: this learner joined a run under way.
        transport: the connection to the peers. In an elastic run it is another one after a meeting.
        membership: the living learners, and the generation.
    """

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
        self._membership_lock = threading.Lock()  # peers are lost in threads of the transport
        self._attached = self._closed = self.joined = False
        self._ready = False  # the weights of this learner belong to the run
        self.group: ElasticGroup | None = None
        self._agreed = membership is not None  # the caller has made sure that all learners begin with equal weights
        self.world = world or (None if transport else init())
        if self.world is not None and self.world.client is not None:
            self.group = _elastic_group(self.world, state, strategy, shards)
            self.joined = self.world.client.joining
            grouped = strategy.members_of_a_group(self.world.local_size) > 1
            self.world.steps.together = strategy.synchronous or grouped
        else:
            self.transport = transport or _transport(self.world, shards)
            self.membership = membership or Membership.of(self.transport.size)

    def begin(self, module: nn.Module) -> None:
        """Agree with the other learners, and take the first weights."""
        self._module = module
        if self.group is not None:
            self._enter(self.group)
        elif not self._agreed:
            if self._shards:
                check_shards_agree(self.strategy, self.transport)
            check_agreement(module, self.strategy, self.transport, self.membership.living)
            take_first_weights(module, self.transport, self.membership.living)

    def attach(self, replica: Replica) -> None:
        """Give the strategy the weights, the transport and the members."""
        members = self.membership  # read before a loss is reported: all learners must begin with one mixing
        self.transport.on_lost(self.peer_lost)
        self.transport.on_silent(self._peer_silent)
        if self.group is not None and self.strategy.synchronous:
            self.strategy.begin_at(self._state.steps)
        self.strategy.attach(replica, self.transport, members)
        self._attached = True
        for peer, reason in self.transport.lost.items():  # lost before the strategy could be told
            self.strategy.peer_lost(peer, reason)
        replica.mark()
        if self.group is not None:
            self.group.follow(self)

    def reconnect(self, group: ElasticGroup, error: Exception, *, ready: bool) -> int:
        """Close the connections because of `error`, and connect to the living learners.

        Args:
            group: the learners of the run.
            error: what the peers are told.
            ready: the weights of this learner still belong to the run.

        Returns how many steps the weights of this learner are behind those of others.
        """
        self._ready = ready
        if self._attached:
            self.strategy.abandon()
        self._attached = False
        self.transport.close(described(error))
        return self._enter(group)

    def _enter(self, group: ElasticGroup) -> int:
        assert self.world is not None
        agreement = agreement_of(self._module, self.strategy, self.world.size, self.world.local_size)
        steps = self._state.steps
        self.transport, newest = group.enter(self.strategy, ready=self._ready, steps=steps, agreement=agreement)
        self.membership, self._ready = group.view.membership, True
        return newest - self._state.steps

    def check(self) -> None:
        """Raise an error if the membership has changed, or if a thread of the transport has failed."""
        if self.group is not None:
            self.group.check()
        self.transport.check()

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
        if self.group is not None and self.world is not None:
            self.world.close(failure)


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
