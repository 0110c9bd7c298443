"""What a strategy is: the four places in a training step where learners may talk."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError
from roundelay.topology import Mixing
from roundelay.transport.base import Transport
from roundelay.weights.replica import Flat, Layout, Replica


class Strategy(ABC):
    """One way to average.

    A step of the learner that holds it goes

        backward -> gradient_ready(each) -> after_backward -> before_step -> optimizer.step() -> after_step

    where the generators yield futures and are resumed when those are done: by a learner that waits, or by the virtual
    clock. After `attach` the strategy knows its replica, its transport and its membership.
    """

    reduces_gradients = False  # True: the learner calls gradient_ready for every gradient as backward produces it
    synchronous = True  # True: learners wait for each other, so a lost peer is an error
    mixes_weights = True  # True: a step begins with weights that the strategy brings in, whatever the module has

    replica: Replica
    transport: Transport
    membership: Membership

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Begin: replicas are equal everywhere at this moment."""
        self.replica, self.transport, self.membership = replica, transport, membership

    def agreement(self, local_size: int) -> str:
        """What all learners must have in common, as text that differs when it does; `local_size` of them are on this machine."""
        return type(self).__name__

    def gradient_ready(self, index: int) -> None:
        """Weight `index` of the replica has its gradient."""

    def after_backward(self) -> Steps:
        """All gradients are there; what is done here, the user's clipping and scaling sees."""
        yield from ()

    def before_step(self) -> Steps:
        """Mixed weights come in."""
        yield from ()

    def after_step(self) -> Steps:
        """New weights go out."""
        yield from ()

    def reform(self, mixing: Mixing, membership: Membership) -> None:
        """From now on exchange with those who live now. May come from any thread.

        Raises StrategyError where that needs a meeting of all.
        """
        raise StrategyError(f"{type(self).__name__} learners must meet before others can take part")

    def drain(self) -> Steps:
        """Nothing of one's own is under way afterwards."""
        yield from ()

    def before_saving(self) -> Steps:
        """Module and strategy hold what a restart needs."""
        yield from self.drain()

    def finish(self) -> Steps:
        """After the last step: leave nobody waiting who has not finished yet."""
        yield from self.drain()

    def lost(self, peer: int, reason: str) -> None:
        """`peer` is gone. May come from any thread."""

    def unheard(self, peer: int, quiet: bool) -> None:  # noqa: FBT001  # a listener
        """`peer` is not heard for a while, or is again. May come from any thread."""

    def abandon(self) -> None:
        """The step under way will not end; release what it holds."""

    def weights(self) -> Flat | None:
        """The replica's weights where they are not the module's own; None where they are."""
        return None

    @property
    def voice(self) -> float:
        """Weight of this learner in the consensus."""
        return 1.0

    def metrics(self) -> dict[str, float]:
        """What happened since the beginning, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


def flats_for_sums(groups: Sequence[Sequence[Tensor]], transport: Transport) -> list[Flat]:
    """Flat buffers for collectives, each of the shape of a group of tensors, on its device.

    Those on the CPU are cut from one piece of the memory that the transport sums fastest: each piece takes file descriptors.
    """
    lengths = [Layout.of(tensors).nbytes for tensors in groups if tensors[0].device.type == "cpu"]
    pieces = iter(transport.allocate(sum(lengths)).split(lengths) if lengths else ())
    return [
        Flat(tensors, lambda nbytes: next(pieces))
        if tensors[0].device.type == "cpu"
        else Flat(tensors, on=tensors[0].device)
        for tensors in groups
    ]


def flat_with_shadow(tensors: Sequence[Tensor], transport: Transport) -> Flat:
    """A flat buffer that the module's weights may show, where the transport's memory can be there twice."""
    flat = Flat(tensors, transport.allocate)
    return flat.cast(transport.shadow(flat.storage))


def fingerprint(mixing: Mixing) -> str:
    """Tells mixings apart: some rows of some rounds."""
    ranks, rounds = range(min(mixing.size, 8)), range(4)
    return repr([(mixing, rank, round, mixing.row(rank, round)) for rank in ranks for round in rounds])


def check_size(mixing: Mixing, membership: Membership) -> None:
    """Raise StrategyError unless the mixing fits the learners that are there."""
    if mixing.size != membership.size:
        raise StrategyError(
            f"the mixing {mixing!r} is for {mixing.size} learners but {membership.size} are here; "
            "build it with world.size"
        )
