"""What a strategy is: the places in a training step where learners may exchange weights or gradients."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC
from collections.abc import Iterator
from typing import Any

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError, TopologyError
from roundelay.topology import Family, Mixing, random_ring
from roundelay.transport.base import Transport
from roundelay.weights import Flat, Replica

log = logging.getLogger("roundelay")


class Strategy(ABC):
    """One way to average.

    One step of a learner calls, in this order:

        backward -> gradient_ready(each) -> after_backward -> before_step -> optimizer.step() -> after_step

    The generators yield futures and are resumed when those are done: by a `Learner` that blocks, or by the virtual
    clock. After `attach` a strategy knows its replica, its transport and its membership. Other code asks
    these attributes, never the name of a strategy.

    Attributes:
        reduces_gradients: the learner calls `gradient_ready` for every gradient as backward produces it.
        synchronous: learners wait for each other, so the loss of a peer is an error.
        mixes_weights: a step begins with weights that the strategy brings in, whatever the module holds.
        needs_equal_weights: all replicas must be equal, so a learner that joins takes the exact weights of the others.
        uses_collectives: it sums over groups of learners, which takes Gloo or NCCL.
        takes_groups: it can run between super-learners.
        reforms_alone: it follows a changed membership by `reform`, without a meeting of all learners.
        rounds_by_step: set before `attach`: the round of a step is the number of the step, whatever happened before, so
            that processes which step together call the same partners.
    """

    reduces_gradients = False
    synchronous = True
    mixes_weights = True
    needs_equal_weights = False
    uses_collectives = True
    takes_groups = True
    reforms_alone = False
    rounds_by_step = False

    replica: Replica
    transport: Transport
    membership: Membership

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Begin with these weights. A strategy that needs equal replicas is given equal ones."""
        self.replica, self.transport, self.membership = replica, transport, membership

    def agreement(self, size: int, local_size: int) -> str:
        """Text that must be equal on all `size` learners, `local_size` of which run on this machine."""
        return type(self).__name__

    def begin_at(self, step: int) -> None:
        """Count rounds from this number of steps, which is the same on all learners. Called before `attach`."""

    def members_of_a_group(self, local_size: int) -> int:
        """How many learners act as one; `local_size` of them run on this machine."""
        return 1

    def gradient_ready(self, index: int) -> None:
        """Weight `index` of the replica has its gradient."""

    def after_backward(self) -> Steps:
        """All gradients are there. The user's clipping and scaling sees what this leaves in them."""
        yield from ()

    def before_step(self) -> Steps:
        """Bring the mixed weights in."""
        yield from ()

    def after_step(self) -> Steps:
        """Send the new weights out."""
        yield from ()

    def reform(self, membership: Membership) -> None:
        """Exchange with these members from now on. Any thread may call this.

        Raises StrategyError unless `reforms_alone`.
        """
        raise StrategyError(f"{type(self).__name__} learners must meet before the membership can change")

    def drain(self) -> Steps:
        """Wait until this learner has no exchange of its own under way."""
        yield from ()

    def before_saving(self) -> Steps:
        """Put all that a restart needs into the module and `state_dict`."""
        yield from self.drain()

    def finish(self) -> Steps:
        """After the last step: stay until no peer needs this learner for its own steps."""
        yield from self.drain()

    def peer_lost(self, peer: int, reason: str) -> None:
        """`peer` is gone. Any thread may call this."""

    def peer_silent(self, peer: int, *, silent: bool) -> None:
        """No heartbeat of `peer` has come for a while, or one has come again. Any thread may call this."""

    def abandon(self) -> None:
        """The step under way will not end: release what it holds."""

    def weights(self) -> Flat | None:
        """The replica's weights if they are not the module's own; None if they are."""
        return None

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[Flat | None]:
        """In this block nothing changes `weights()` or the optimizer's state. Any thread may enter it."""
        yield self.weights()

    @property
    def consensus_weight(self) -> float:
        """The weight of this learner's replica in the mean model."""
        return 1.0

    def metrics(self) -> dict[str, float]:
        """What has happened since `attach`, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart beside the module and the optimizer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there, with the weights that the module has now."""


def mixing_over(family: Family, membership: Membership) -> Mixing:
    """The mixing of a topology for the learners that are there.

    Raises TopologyError if the topology does not exist for that many learners at the start. Later, when learners have
    been lost or have joined, a random ring replaces it, because it fits any number.
    """
    try:
        return family(membership.size)
    except TopologyError as error:
        if membership.generation == 0:
            raise
        log.warning("%s; going on with random-ring", error)
        return random_ring(membership.size)


def fingerprint(mixing: Mixing) -> str:
    """Text that tells mixings apart: some rows of some rounds."""
    ranks, rounds = range(min(mixing.size, 8)), range(4)
    return repr([(mixing, rank, round, mixing.row(rank, round)) for rank in ranks for round in rounds])


def spread(disagreement2: float, size: int) -> float:
    """Rms distance from consensus, given the mean of |x_i - x_j|^2 over pairs: it is 2 n/(n-1) spread^2."""
    return (disagreement2 * (size - 1) / (2 * size)) ** 0.5 if size > 1 else 0.0
