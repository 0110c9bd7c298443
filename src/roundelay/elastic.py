"""What happens to a learner when another one joins, leaves or is lost: connecting again, and re-forming the strategy.

A strategy that re-forms alone (ADPSGD, LocalSGD) follows every change while it trains. With any other strategy learners
*meet*: they stop at a barrier, compare how far each one is, and go on together from the first chunk that is not known
to be used by all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from torch import Tensor

from roundelay import waiting
from roundelay.cluster.endpoint import Endpoint
from roundelay.cluster.membership import Address, Membership, View
from roundelay.cluster.rendezvous.awaited_replies import PATIENCE_S
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.cluster.rendezvous.members import STARTED_AGAIN
from roundelay.errors import (
    DroppedError,
    LaunchError,
    MembershipChangedError,
    PeerLostError,
    RendezvousLostError,
    described,
)
from roundelay.meeting import CONNECTED, GATHERED, Progress, agreed_progress, check_groups, progress_in, values_in
from roundelay.state_transfer import take_mean, take_newest
from roundelay.strategies.base import Strategy
from roundelay.training_state import TrainingState
from roundelay.transport.base import LEFT, Transport
from roundelay.transport.healing import RETRY_S
from roundelay.transport.heartbeats import BEAT_S, NO_HEARTBEAT

log = logging.getLogger("roundelay")

Result = TypeVar("Result")


class Follower(Protocol):
    """What follows the membership: the `Peers` of a learner."""

    strategy: Strategy

    @property
    def transport(self) -> Transport:
        """The connection to the peers."""

    def reform(self, membership: Membership) -> None:
        """Continue with these members."""


class MembershipChanges:
    """Applies every change of the membership to a learner while it trains. Its callbacks run in threads of others.

    A strategy that re-forms alone follows each new view. With any other strategy the training thread raises
    MembershipChangedError, so that the learners meet.

    Args:
        group: the learners that train together; its view follows the changes.
        learner: what trains.
        client: announces new views.
        state: what `learner` trains; learners that join fetch it.
        group_size: learners in a super-learner.
    """

    def __init__(
        self, group: ElasticGroup, learner: Follower, client: RendezvousClient, state: TrainingState, group_size: int
    ) -> None:
        self._group, self._learner, self._client = group, learner, client
        self._state, self._group_size = state, group_size

    def begin(self) -> None:
        """Follow changes from now on, the first of which may have come while the learner connected."""
        learner = self._learner
        if learner.strategy.reforms_alone:
            learner.transport.offer(self._live_state)
            learner.transport.keep_reaching(lambda: self._group.view.membership.living, self._link_changed)
        self._client.on_view = self._changed
        if self._client.joining and learner.strategy.reforms_alone:
            self._client.ready()
        newest = self._client.view
        assert newest is not None
        if newest.membership.generation > self._group.view.membership.generation:
            self._changed(newest, "it changed while this learner connected")
        else:
            self._client.confirm_view()

    def _live_state(self) -> Tensor:
        with self._learner.strategy.at_rest() as weights:
            return self._state.to_bytes(weights)

    def _changed(self, view: View, reason: str) -> None:
        """Handle a new view, in the client's thread. The transport raises errors again in the training thread."""
        try:
            if self._learner.strategy.reforms_alone:
                self._adopt(view, reason)
            elif reason:  # an empty reason: a learner has finished and left
                self._learner.transport.fail(MembershipChangedError(reason))
        except BaseException as error:
            self._learner.transport.fail(error)

    def _adopt(self, view: View, reason: str) -> None:
        transport, before = self._learner.transport, self._group.view
        self._group.view = view
        for gone in set(before.membership.living) - set(view.membership.living):
            transport.lose(gone, reason or LEFT)
        for other, address in view.addresses.items():
            if other != self._group.id and address != before.addresses.get(other):
                transport.admit(other, address)
        if view.membership.whole_groups(self._group_size).size:
            self._learner.reform(view.membership)
        self._client.confirm_view()

    def _link_changed(self, peer: int, reached: bool) -> None:  # noqa: FBT001
        """A peer that still lives can no longer be reached, or can be again. Called in a thread of the transport."""
        log.warning("learner %d can%s reach learner %d", self._group.id, " again" if reached else "not", peer)
        try:
            if reached:
                self._learner.reform(self._group.view.membership)
            self._group.on_link(peer, reached)
        except BaseException as error:
            self._learner.transport.fail(error)


class ElasticGroup:
    """The learners that train together, as one of them sees them.

    Args:
        client: the client of the rendezvous; this learner must be registered already.
        endpoint: connects this learner to the others.
        state: what this learner trains.
        group_size: learners in a super-learner. If one of them is lost, the whole super-learner is lost.

    Attributes:
        id: of this learner.
        view: the view that this learner trains with.
        has_weights: this learner's weights belong to the run, or did until it was dropped.
        revived: this learner was dropped, and goes on with its weights, because no other learner was left.
        took_state: whether the last `connect` replaced this learner's state by that of others.
        learner: what trains, once `follow` was called.
        grouped: addresses of the learners that collectives were last formed for.
        on_link: called, in a thread of the transport, with a peer and whether it can be reached, when that changes.
        stopping: returns whether this learner was asked to stop; called while the learner waits to reach its peers.
    """

    def __init__(
        self, client: RendezvousClient, endpoint: Endpoint, state: TrainingState, *, group_size: int = 1
    ) -> None:
        self._client, self._endpoint, self._state, self._group_size = client, endpoint, state, group_size
        assert client.id is not None
        assert client.view is not None
        self.id, self.view = client.id, client.view
        self.learner: Follower | None = None
        self._not_reached: Counter[int] = Counter()  # by peer, how often in a row it could not be connected to
        self.took_state = self.has_weights = self.revived = False
        self.on_link: Callable[[int, bool], None] = lambda peer, reached: None
        self.stopping: Callable[[], bool] = lambda: False
        self.grouped: dict[int, Address] = {}

    # Connecting ----------------------------------------------------------------------------------------------------------

    def enter(self, strategy: Strategy, *, ready: bool, steps: int, agreement: str) -> tuple[Transport, int]:
        """Connect to all living learners, at the start or after a change; try again until the membership stays as it is.

        Learners that begin together take the weights of the first of them. A learner that joins takes those of others.

        Args:
            strategy: the strategy that this learner is going to attach.
            ready: the weights of this learner belong to this run.
            steps: the number of steps that its weights have seen.
            agreement: text that must be equal on all learners.

        Returns the transport, and the largest number of steps that the weights of a learner have seen.

        Raises StrategyError if the learners do not fit together, LaunchError if this learner cannot go on.
        """
        self._state.agreement = agreement
        progress = Progress(ready, 0, steps, initial=not ready and not self._client.joining, agreement=agreement)
        while True:
            try:
                self._client.check()
                if strategy.reforms_alone and self._client.joining:
                    return self.connect(strategy, ready=False), self._state.steps
                agreed = self.meet(progress)
                ready = progress.ready or progress.initial or self.revived
                return self.connect(strategy, ready=ready), agreed.weight_steps
            except (DroppedError, PeerLostError, MembershipChangedError) as error:
                log.warning("learner %d connects again: %s", self.id, error)
                if isinstance(error, DroppedError) or (strategy.reforms_alone and self._client.joining):
                    progress = replace(progress, ready=False, initial=False)
                    if isinstance(error, DroppedError):
                        self.rejoin()
                    else:
                        self.join_later()

    def check(self) -> None:
        """Raise DroppedError if the run goes on without this learner."""
        self._client.check()

    def connect(self, strategy: Strategy, *, ready: bool) -> Transport:
        """Connect to the learners of the view. Afterwards the module and the optimizer hold the state to go on with.

        Args:
            strategy: says whether learners join without a meeting, and whether they need equal weights.
            ready: the weights of this learner belong to this run, or may be its first ones.

        Raises PeerLostError or MembershipChangedError if the membership changes meanwhile.
        """
        joining = strategy.reforms_alone and not ready
        if joining and not self._client.begun:  # the others still meet to begin, and this learner would hold them up
            raise PeerLostError(self.view.membership.living[0], "it has not begun to train")
        self.took_state, self.grouped = False, {}
        try:
            transport = self._endpoint.connect(self.id, self.view, joining=joining)
        except PeerLostError as error:
            self._not_reached[error.peer] += 1
            raise
        self._not_reached.clear()
        try:
            if joining:
                take_mean(self.id, self._state, transport, self.view.membership)
                self.took_state = True
            elif self.view.values:  # a meeting has formed this view
                progress, equal = progress_in(self.view), strategy.needs_equal_weights
                self.took_state = take_newest(self.id, self._state, transport, progress, needs_equal_weights=equal)
                self._wait_for_all(transport)
        except BaseException as error:
            transport.close(described(error))
            raise
        self.has_weights = True
        return transport

    def _wait_for_all(self, transport: Transport) -> None:
        """Wait until all learners have their state. Raises MembershipChangedError if one was lost meanwhile."""
        view = self._client.barrier(self.view.membership.generation, {CONNECTED: True}, _unreachable(transport))
        if (
            any(CONNECTED not in value for value in view.values.values())
            or view.membership.living != self.view.membership.living
        ):
            raise MembershipChangedError("a learner was lost before all could go on")
        self.view = replace(view, values=self.view.values)

    def rejoin(self) -> None:
        """Register again after DroppedError: the others went on without this learner.

        If the rendezvous is away, try again.

        Raises LaunchError if another process has taken the place of this learner, or if no learner is left to join;
        RendezvousLostError if the rendezvous is away for longer than `PATIENCE_S`.
        """
        until = waiting.now() + PATIENCE_S
        while True:
            if self._client.dropped == STARTED_AGAIN:
                raise LaunchError(f"learner {self.id} ends, because {STARTED_AGAIN}: a run has one process per learner")
            try:
                self.view = self._client.rejoin(self._endpoint.open(), weights=self.has_weights)
            except (DroppedError, RendezvousLostError) as error:
                if waiting.now() > until or self.stopping():
                    raise
                log.warning("learner %d tries again to join: %s", self.id, error)
                waiting.sleep(BEAT_S)
            else:
                self.revived = not self._client.joining
                return

    def join_later(self, unreached: str = "the others") -> None:
        """Register again after a while: this learner joins, and cannot reach `unreached`.

        Raises LaunchError if this learner was asked to stop, or if no learner is left that it could join.
        """
        if self.stopping():
            raise LaunchError(f"learner {self.id} leaves, because it cannot reach {unreached}")
        waiting.sleep(RETRY_S)
        self.rejoin()

    # Meetings ------------------------------------------------------------------------------------------------------------

    def meet(self, progress: Progress) -> Progress:
        """Form a new view of all living learners.

        Returns the chunk at which they all continue, and how many steps the newest weights have seen.

        Raises MembershipChangedError if the learners must meet once more, LaunchError if this learner cannot go on.
        """
        self._client.on_view = lambda view, reason: None  # the meeting gives the newest view
        self._wait_until_reachable()
        progress = replace(progress, ready=progress.ready or self.revived, earlier=self.has_weights)
        lost = _unreachable(self.learner.transport) if self.learner and progress.ready else []
        lost += [peer for peer, times in self._not_reached.items() if times > 1]
        generation = self.view.membership.generation
        self.view = self._client.barrier(generation, progress.to_value(), lost, self._endpoint.open())
        self._client.joining = False  # the barrier has admitted this learner
        check_groups(self.id, self.view.membership, self._group_size)
        return agreed_progress(progress, progress_in(self.view))

    def _wait_until_reachable(self) -> None:
        """A learner that joins waits until it can reach all others: otherwise they would stop for a meeting that fails."""
        said = False
        while self._client.joining:
            others = {peer: address for peer, address in self.view.addresses.items() if peer != self.id}
            cut_off = [peer for peer, address in others.items() if not self._endpoint.reaches(self.id, peer, address)]
            if not cut_off:
                return
            if not said:
                said = True
                log.warning("learner %d cannot reach learners %s, and tries again until it can", self.id, cut_off)
            self.join_later(f"learners {cut_off}")

    # While it trains ------------------------------------------------------------------------------------------------------------

    def follow(self, learner: Follower) -> None:
        """Apply every change of the membership to `learner` from now on."""
        self.learner = learner
        MembershipChanges(self, learner, self._client, self._state, self._group_size).begin()

    def gather(self, value: object, timeout_s: float | None = None) -> View:
        """Wait for all living learners. Returns a view whose `values` has the values of all.

        Raises MembershipChangedError if other learners meet instead, because the membership has changed. Raises
        MissingLearnersError if some have not come within `timeout_s`.
        """
        view = self._client.barrier(self.view.membership.generation, {GATHERED: value}, timeout_s=timeout_s)
        return replace(view, values=values_in(view, GATHERED))


def _unreachable(transport: Transport) -> list[int]:
    """Peers whose heartbeats have stopped. A closed connection proves nothing: learners close theirs to meet."""
    return [peer for peer, reason in transport.lost.items() if reason.startswith(NO_HEARTBEAT)]
