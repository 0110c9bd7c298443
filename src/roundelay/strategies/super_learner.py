"""Super-learners: a group acts as one learner, with an allreduce inside and any strategy between groups."""

from __future__ import annotations

from typing import Any

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError
from roundelay.strategies.allreduce import Allreduce
from roundelay.strategies.base import Strategy, flats_for_sums
from roundelay.topology import Mixing
from roundelay.transport.base import Transport
from roundelay.weights.replica import Flat, Replica


class SuperLearner(Strategy):
    r"""Gradients are reduced inside a group; `between` averages the groups (arXiv:2002.01119, section on super-learners).

    One leader per group owns the weights that other groups see: it brings the mixed weights in, applies the group's
    mean gradient to them and broadcasts the result inside, so that members are bit-identical. The broadcast is the price.
    It comes after the step, because during the step the leader holds the lock that exchanges wait for.

    Args:
        between: the strategy between groups; its mixing has one place per group.
        group_size: learners per group, consecutive by rank; those of one machine unless said.
    """

    reduces_gradients = True
    leads = False

    def __init__(self, between: Strategy, group_size: int | None = None) -> None:
        if group_size is not None and group_size < 1:
            raise StrategyError(f"group_size must be at least 1, got {group_size}")
        if between.reduces_gradients or not between.mixes_weights:
            raise StrategyError(
                f"between groups weights are averaged, but {type(between).__name__} averages gradients; "
                "use DPSGD, ADPSGD or DelayByOne, or plain Allreduce without groups"
            )
        self.between, self.group_size = between, group_size
        self.synchronous = between.synchronous
        self.inside = Allreduce()

    def agreement(self, local_size: int) -> str:
        """The groups, and the strategy between them."""
        return f"{super().agreement(local_size)} {self.group_size or local_size} {self.between.agreement(local_size)}"

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Form the group; its leader joins the other leaders."""
        size = self.group_size or transport.local_size
        if membership.size % size:
            raise StrategyError(f"group_size {size} must divide the {membership.size} learners that are here")
        super().attach(replica, transport, membership)
        first = membership.position(transport.rank) // size * size
        members = membership.living[first : first + size]
        leaders = membership.living[::size]
        self.leader = members[0]
        self.leads = transport.rank == self.leader
        self._members = members
        [self._mixed] = flats_for_sums([replica.tensors()], transport)
        self.inside.attach(replica, transport, Membership(members, membership.generation))
        if self.leads:
            self.between.attach(replica, transport, Membership(leaders, membership.generation))

    def reform(self, mixing: Mixing, membership: Membership) -> None:
        """The leaders of whole groups go on; the mixing has a place for each of those groups."""
        self.membership = membership.whole_groups(len(self._members))
        if self.leads and self.transport.rank in self.membership.living:
            leaders = self.membership.living[:: len(self._members)]
            self.between.reform(mixing, Membership(leaders, membership.generation))

    def gradient_ready(self, index: int) -> None:
        """Inside the group."""
        self.inside.gradient_ready(index)

    def after_backward(self) -> Steps:
        """The mean gradient of the group.

        Raises StrategyError if a member has finished already: the group could not stay one learner.
        """
        yield from self.inside.after_backward()
        if self.inside.active < len(self._members):
            raise StrategyError(
                f"{len(self._members) - self.inside.active} learners of this group of {len(self._members)} have finished "
                "before the others; give the members of a group equally many batches"
            )

    def before_step(self) -> Steps:
        """The leader brings the mixed weights in."""
        if self.leads:
            yield from self.between.before_step()

    def after_step(self) -> Steps:
        """The leader's new weights go out to other groups, and to its own."""
        if self.leads:
            yield from self.between.after_step()
        yield from self._follow_leader()

    def _follow_leader(self) -> Steps:
        if len(self._members) == 1:
            return
        if self.leads:
            self.replica.copy_to(self._mixed)
        yield self.transport.broadcast(self._mixed.storage, self.leader, self._members)
        if not self.leads:
            self.replica.copy_from(self._mixed)

    def drain(self) -> Steps:
        """As the strategy between groups; members have what their leader has then."""
        if self.leads:
            yield from self.between.drain()
        yield from self._follow_leader()

    def before_saving(self) -> Steps:
        """As the strategy between groups."""
        if self.leads:
            yield from self.between.before_saving()

    def finish(self) -> Steps:
        """The group ends together, leaders finish between groups, then every member has its leader's weights."""
        yield from self.inside.finish()
        if self.leads:
            yield from self.between.finish()
        yield from self._follow_leader()

    def lost(self, peer: int, reason: str) -> None:
        """A lost leader of another group is the business of the strategy between."""
        if self.leads:
            self.between.lost(peer, reason)

    def unheard(self, peer: int, quiet: bool) -> None:  # noqa: FBT001  # a listener
        """As for a lost one."""
        if self.leads:
            self.between.unheard(peer, quiet)

    def abandon(self) -> None:
        """As the strategy between groups."""
        if self.leads:
            self.between.abandon()

    def weights(self) -> Flat | None:
        """The leader's."""
        return self.between.weights() if self.leads else None

    @property
    def voice(self) -> float:
        """A group has one voice in the consensus, its leader's."""
        return 1.0 if self.leads else 0.0

    def metrics(self) -> dict[str, float]:
        """Those between groups, at the leader."""
        return self.between.metrics() if self.leads else {}

    def state_dict(self) -> dict[str, Any]:
        """That of the strategy between."""
        return {"between": self.between.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if self.leads:
            self.between.load_state_dict(state["between"])
