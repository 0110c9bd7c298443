"""Those who train together: who they are, how they come by equal weights, and what happens when one comes or goes.

Asynchronous learners take a change up where they stand. Synchronous ones *meet*: each comes with how far it is, and they go on as
those who are there, a step before the least far, so that no sample is left out.
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import wait
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from torch import Tensor

from roundelay.cluster.rendezvous.client import RendezvousClient, View
from roundelay.cluster.rendezvous.state import Address, Run
from roundelay.errors import LaunchError, MembershipChangedError, PeerLostError
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD
from roundelay.training.build import mixing_of
from roundelay.training.config import Config
from roundelay.training.state import Carried
from roundelay.transport.base import LEFT, Transport
from roundelay.transport.heartbeats import SILENT
from roundelay.transport.tcp import TcpTransport

log = logging.getLogger("roundelay")

DONORS = 2  # a learner that joins begins with the mean of so many neighbours


class Endpoint(Protocol):
    """How a learner is reached, and reaches others."""

    def open(self) -> Address:
        """Where the next transport will be found."""

    def connect(self, me: int, term: View, *, joins: bool) -> Transport:
        """To the learners of `term`, who are under way already if this one joins them."""


@dataclass(frozen=True)
class Progress:
    """What a learner brings to a meeting.

    Attributes:
        ready: it has weights of this run.
        begun: the number of the chunk from which on it cannot vouch for everybody's having used them.
        taken: steps that its weights have seen.
    """

    ready: bool
    begun: int
    taken: int


class Company:
    """One learner's view of those it trains with.

    Args:
        config: of the run.
        line: to the rendezvous, with which this learner has registered.
        door: to the others.
        carried: what this learner trains.
        members: learners in a group, which is one failure domain.
    """

    def __init__(
        self, config: Config, line: RendezvousClient, door: Endpoint, carried: Carried, *, members: int = 1
    ) -> None:
        self._config, self._line, self._door, self._carried = config, line, door, carried
        self._members = members
        assert line.id is not None
        assert line.term is not None
        self.id, self.term = line.id, line.term
        self._learner: Learner | None = None
        self._absent: Counter[int] = Counter()  # who was not to be found in so many terms

    @property
    def synchronous(self) -> bool:
        """Whether a change needs a meeting."""
        return self._config.synchronous

    # Beginning a term -------------------------------------------------------------------------------------------------------

    def enter(self, *, joins: bool) -> Transport:
        """Connect to the learners of this term; afterwards the weights are those to go on with."""
        try:
            transport = self._door.connect(self.id, self.term, joins=joins)
        except PeerLostError as error:
            self._absent[error.peer] += 1
            raise
        self._absent.clear()
        try:
            if joins:
                self._take_from_neighbours(transport)
            elif self.term.values:
                self._make_weights_fit(transport)
        except BaseException as error:
            transport.close(f"{type(error).__name__}: {error}")
            raise
        return transport

    def _take_from_neighbours(self, transport: Transport) -> None:
        """Begin with the mean of the first neighbours that answer."""
        assert isinstance(transport, TcpTransport)
        living, mixing = self.term.membership, mixing_of(self._config, self.term.membership.size)
        own = living.position(self.id)
        places = (mixing.partner(own, round) for round in range(4 * DONORS))
        near = list(dict.fromkeys(living.living[place] for place in places if place not in (None, own)))
        others = [learner for learner in living.living if learner not in (*near, self.id)]
        for few in (near[:DONORS], *([other] for other in (*near[DONORS:], *others))):
            fetched = wait([transport.fetch(learner) for learner in few]).done
            states = [each.result() for each in fetched if not isinstance(each.exception(), PeerLostError)]
            if states:
                self._carried.adopt(states)
                return
        raise LaunchError("none of the learners that are under way could give this one their weights")

    def _make_weights_fit(self, transport: Transport) -> None:
        """After a meeting: who has no weights, or older ones where all must be equal, takes them from who is furthest."""
        assert isinstance(transport, TcpTransport)
        ready = {learner: each.taken for learner, each in self._progress().items() if each.ready}
        furthest = max(ready.values())
        source = min(learner for learner, taken in ready.items() if taken == furthest)
        must_be_equal = self._config.strategy in ("allreduce", "delay-by-one-gradients")
        transport.offer(self._carried.encoded)
        if self.id not in ready or (must_be_equal and ready[self.id] < furthest):
            self._carried.adopt([transport.fetch(source).result()])
        self._wait_for_all(transport)

    def _wait_for_all(self, transport: Transport) -> None:
        """Nobody trains before all have their weights. Raises MembershipChangedError if not all are there any more."""
        ready = self._line.meet(self.term.membership.generation, lost=_unreachable(transport))
        if ready.membership.living != self.term.membership.living:
            raise MembershipChangedError("somebody was lost while the others were about to go on")
        self.term = replace(ready, values=self.term.values)

    # Changes ------------------------------------------------------------------------------------------------------------------

    def follow(self, learner: Learner) -> None:
        """From now on `learner` hears of who comes and goes."""
        self._learner = learner
        if isinstance(learner.strategy, ADPSGD) and isinstance(learner.transport, TcpTransport):
            learner.transport.offer(self._live)
        self._line.on_term = self._changed
        if self._line.joins and not self.synchronous:  # synchronous ones have met
            self._line.joins = False
            self._line.arrived()
        newest = self._line.term
        assert newest is not None
        if newest.membership.generation > self.term.membership.generation:
            self._changed(newest, "it changed meanwhile")
        else:
            self._line.healed()

    def _live(self) -> Tensor:
        assert self._learner is not None
        assert isinstance(self._learner.strategy, ADPSGD)
        with self._learner.strategy.at_rest() as live:
            return self._carried.encoded(live)

    def _changed(self, term: View, reason: str) -> None:
        """The membership is another one now. In the line's thread."""
        learner = self._learner
        assert learner is not None
        transport = learner.transport
        if not isinstance(transport, TcpTransport):
            return
        try:
            if self.synchronous:
                if reason:  # else somebody has only finished and left
                    transport.fail(MembershipChangedError(reason))
                return
            before, self.term = self.term, term
            for gone in set(before.membership.living) - set(term.membership.living):
                transport.lose(gone, reason or LEFT)
            for other, address in term.addresses.items():
                if other != self.id and address != before.addresses.get(other):
                    transport.admit(other, address)
            groups = term.membership.whole_groups(self._members).size // self._members
            if groups:
                learner.reform(mixing_of(self._config, groups), term.membership)
            self._line.healed()
        except BaseException as error:  # raised where the training thread looks next
            transport.fail(error)

    def rejoin(self) -> None:
        """The others went on without this learner: register again."""
        self.term = self._line.register(run_of(self._config), self._door.open(), self.id)

    def meet(self, progress: Progress) -> int:
        """Form the next term of all that live; from which chunk on it trains."""
        self._line.on_term = lambda term, reason: None  # the meeting will tell
        lost = _unreachable(self._learner.transport) if self._learner and progress.ready else []
        lost += [peer for peer, times in self._absent.items() if times > 1]
        self.term = self._line.meet(self.term.membership.generation, asdict(progress), lost, self._door.open())
        self._leave_broken_groups()
        begun = [each.begun for each in self._progress().values() if each.ready]
        if not begun:
            raise LaunchError(
                "no learner is left that has the weights of this run; go on from a checkpoint by --resume"
            )
        return min(begun)

    def _leave_broken_groups(self) -> None:
        """A group is one failure domain: who has lost a member of it leaves, and the others meet without."""
        living = self.term.membership.living
        whole = self.term.membership.whole_groups(self._members).living
        if self.id not in whole:
            raise LaunchError(f"learner {self.id} leaves, for its group of {self._members} has lost a member")
        if whole != living:
            raise MembershipChangedError(f"the groups of learners {sorted(set(living) - set(whole))} are not whole")

    def furthest(self) -> int:
        """Steps that the weights have seen which the meeting chose."""
        return max(each.taken for each in self._progress().values() if each.ready)

    def _progress(self) -> dict[int, Progress]:
        return {learner: Progress(**value) for learner, value in self.term.values.items()}

    def gather(self, *, left: bool) -> View:
        """At the end: all meet, and hear who has left the model."""
        return self._line.meet(self.term.membership.generation, left)


def run_of(config: Config, local_size: int | None = None) -> Run:
    """What the rendezvous must know of a run."""
    size = config.learners
    members = size if config.synchronous else config.group_size or local_size or size
    return Run(size, tuple(learner // members for learner in range(size)), config.min_learners)


def _unreachable(transport: Transport) -> list[int]:
    """Peers that are not heard although they may live; a broken connection is no proof, for those who meet close theirs."""
    lost = transport.lost if isinstance(transport, TcpTransport) else {}
    return [peer for peer, reason in lost.items() if reason.startswith(SILENT)]
