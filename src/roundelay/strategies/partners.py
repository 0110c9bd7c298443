"""Which peer an asynchronous learner calls next."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from roundelay.cluster.membership import Membership
from roundelay.topology import Mixing
from roundelay.transport.base import LEFT, NO_CALLS

log = logging.getLogger("roundelay")

RANDOM_TRIES = 64  # per learner: how many rounds of a random mixing to search for a reachable partner


class Partners:
    """The neighbours of a learner's own rounds, without the peers that cannot be reached.

    The training thread asks; the transport's threads report peers that are lost or silent. A lock guards all of it.

    Args:
        rank: this learner.

    Attributes:
        round: the next own round.
        lost: peers that are gone.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.round = 0
        self.lost: set[int] = set()
        self._finished: set[int] = set()  # those of the lost peers that have finished in order
        self._silent: set[int] = set()
        self._lock = threading.Lock()
        self._waiting: Future[None] | None = None
        self._said_alone = False

    def use(self, mixing: Mixing, membership: Membership) -> None:
        """Take partners from this mixing over these members; none of them counts as lost any more."""
        with self._lock:
            self._mixing, self._membership = mixing, membership
            self._position = membership.position(self._rank)
            self.lost.difference_update(membership.living)
            self._finished.difference_update(membership.living)
            self._said_alone = False

    def next(self, busy: int | None = None) -> int | None:
        """Advance to the next own round with a reachable partner other than `busy`; return the partner, or None."""
        with self._lock:
            living, mixing = self._membership.living, self._mixing
            reachable = {*living} - self.lost - self._silent - {self._rank, busy}
            tries = mixing.size * (2 if mixing.period else RANDOM_TRIES) if reachable else 0
            for _ in range(tries):
                partner = mixing.partner(self._position, self.round)
                self.round += 1
                if partner is not None and living[partner] in reachable:
                    return living[partner]
            failed = len(living) > 1 and busy is None and not self._silent and not self._finished
            if failed and not self._said_alone:
                self._said_alone = True
                log.warning("learner %d has no neighbour left to exchange with and goes on alone", self._rank)
            return None

    def lose(self, peer: int, reason: str) -> None:
        """`peer` is gone. At the end of a run, when peers have finished in order, no warning is given."""
        with self._lock:
            self.lost.add(peer)
            if reason in (LEFT, NO_CALLS):
                self._finished.add(peer)
            self._silent.discard(peer)

    def set_silent(self, peer: int, *, silent: bool) -> None:
        """`peer` does not answer for the moment, or does again; `change` is done."""
        with self._lock:
            if silent and peer not in self.lost:  # a lost peer would stay silent when it comes back
                self._silent.add(peer)
            else:
                self._silent.discard(peer)
        self.report_change()

    def report_change(self) -> None:
        """Wake the thread that waits for a `change`."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set_result(None)

    def is_silent(self, peer: int) -> bool:
        """Whether `peer` does not answer for the moment."""
        with self._lock:
            return peer in self._silent

    def change(self) -> Future[None]:
        """Done at the next `set_silent` or `report_change`. One thread waits at a time: an earlier future is forgotten."""
        with self._lock:
            self._waiting = Future()
            return self._waiting
