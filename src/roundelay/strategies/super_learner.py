"""Super-learners: a group acts as one learner, with an allreduce inside and any strategy between groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError
from roundelay.strategies.allreduce import Allreduce
from roundelay.strategies.base import Strategy
from roundelay.transport.base import Transport
from roundelay.weights import Flat, Replica


class SuperLearner(Strategy):
    r"""Gradients are reduced inside a group; `between` averages the groups (arXiv:2002.01119, section on super-learners).

    One leader per group owns the weights that other groups see. The leader brings the mixed weights in, applies the group's
    mean gradient to them and broadcasts the result inside the group, so that members are bit-identical. This broadcast is
    the cost of super-learners. It comes after the step, because the leader holds the lock that exchanges need during the step.

    Args:
        between: the strategy between groups; its topology is asked for the number of groups.
        group_size: learners per group, consecutive by rank; by default the learners of one machine.
    """

    reduces_gradients = True
    takes_groups = False
    leads = False

    def __init__(self, between: Strategy, group_size: int | None = None) -> None:
        if group_size is not None and group_size < 1:
            raise StrategyError(f"group_size must be at least 1, got {group_size}")
        if not isinstance(between, Strategy):
            raise StrategyError(f"a SuperLearner needs the strategy between groups, such as ADPSGD(), got {between!r}")
        if not between.takes_groups:
            raise StrategyError(
                f"between groups weights are averaged, but {type(between).__name__} averages gradients; "
                "use ADPSGD, DPSGD, LocalSGD or DelayByOne, or plain Allreduce without groups"
            )
        self.between, self.group_size = between, group_size
        self.synchronous, self.reforms_alone = between.synchronous, between.reforms_alone
        self.inside = Allreduce()

    def agreement(self, size: int, local_size: int) -> str:
        """The group size, and what the strategy between groups agrees on."""
        members = self.members_of_a_group(local_size)
        between = self.between.agreement(max(size // members, 1), local_size)
        return f"{super().agreement(size, local_size)} {members} {between}"

    def begin_at(self, step: int) -> None:
        """Groups count rounds like learners."""
        self.between.begin_at(step)

    def members_of_a_group(self, local_size: int) -> int:
        """The size of a group."""
        return self.group_size or local_size

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Form the group; its leader joins the other leaders."""
        size = self.members_of_a_group(transport.local_size)
        if membership.size % size:
            raise StrategyError(f"group_size {size} must divide the {membership.size} learners that are here")
        super().attach(replica, transport, membership)
        first = membership.position(transport.rank) // size * size
        members = membership.living[first : first + size]
        leaders = membership.living[::size]
        self.leader = members[0]
        self.leads = transport.rank == self.leader
        self._members = members
        self._mixed = Flat(replica.tensors(), on=replica.weights[0].device)
        self.inside.attach(replica, transport, Membership(members, membership.generation))
        if self.leads:
            self.between.attach(replica, transport, Membership(leaders, membership.generation))

    def reform(self, membership: Membership) -> None:
        """The leaders of whole groups go on; a group that has lost a member is left out."""
        self.membership = membership.whole_groups(len(self._members))
        if self.leads and self.transport.rank in self.membership.living:
            leaders = self.membership.living[:: len(self._members)]
            self.between.reform(Membership(leaders, membership.generation))

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
        """The leader sends its new weights to other groups, then to its own group."""
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
        """The group ends together, leaders finish between groups, then every member takes its leader's weights."""
        yield from self.inside.finish()
        if self.leads:
            yield from self.between.finish()
        yield from self._follow_leader()

    def peer_lost(self, peer: int, reason: str) -> None:
        """The strategy between groups goes on without a lost leader."""
        if self.leads:
            self.between.peer_lost(peer, reason)

    def peer_silent(self, peer: int, *, silent: bool) -> None:
        """The strategy between groups does not wait for a silent leader."""
        if self.leads:
            self.between.peer_silent(peer, silent=silent)

    def abandon(self) -> None:
        """As the strategy between groups."""
        if self.leads:
            self.between.abandon()

    def weights(self) -> Flat | None:
        """The leader's weights; None for the other members."""
        return self.between.weights() if self.leads else None

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[Flat | None]:
        """As the strategy between groups."""
        if self.leads:
            with self.between.at_rest() as live:
                yield live
        else:
            yield None

    @property
    def consensus_weight(self) -> float:
        """A group counts once in the consensus: its leader has 1, the other members 0."""
        return 1.0 if self.leads else 0.0

    def metrics(self) -> dict[str, float]:
        """Those between groups, at the leader."""
        return self.between.metrics() if self.leads else {}

    def state_dict(self) -> dict[str, Any]:
        """That of the strategy between groups, at the leader. In the other members it is not attached and has no state."""
        return {"between": self.between.state_dict() if self.leads else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        if self.leads:
            self.between.load_state_dict(state["between"])
