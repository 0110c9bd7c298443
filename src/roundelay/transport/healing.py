"""Peers that live but cannot be reached, such as behind a cut link: a thread connects to them again and again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from roundelay import threads
from roundelay.transport.base import LEFT

RETRY_S = 2.0
LATER = 3  # the learner with the higher rank tries at every third look


class Healing:
    """Tries to reach lost peers, from `start` until `close`.

    Of two learners that have lost each other, the one with the lower rank connects. It may not know that the other one has
    lost it, so that one connects, too, after a while.

    Args:
        rank: this learner.
        lost: returns the peers that are lost, and why.
        wanted: returns the peers that take part, as the rendezvous says.
        reach: connects to a peer again; returns whether the peer answers.
        report: called with a peer and False when it is found to be cut off, and with True when it is reached again.
    """

    def __init__(
        self,
        rank: int,
        lost: Callable[[], Mapping[int, str]],
        wanted: Callable[[], Iterable[int]],
        reach: Callable[[int], bool],
        report: Callable[[int, bool], None],
    ) -> None:
        self._rank, self._lost, self._wanted, self._reach, self._report = rank, lost, wanted, reach, report
        self._cut_off: set[int] = set()
        self._looks: Counter[int] = Counter()  # by peer: how often in a row it was found to be cut off
        self._closed = threading.Event()

    def start(self) -> None:
        """Look every `RETRY_S`, in a thread."""
        threads.start("healing", self._run)

    def _run(self) -> None:
        while not self._closed.wait(RETRY_S):
            self.look()

    def look(self) -> None:
        """Try once to reach every peer that is cut off."""
        wanted, lost = set(self._wanted()), self._lost()
        cut_off = {peer for peer, reason in lost.items() if peer in wanted and reason != LEFT}
        for peer in cut_off - self._cut_off:
            self._report(peer, False)
        self._looks = Counter({peer: self._looks[peer] + 1 for peer in cut_off})
        reached = {peer for peer in cut_off if self._connects_to(peer) and self._reach(peer)}
        for peer in (self._cut_off & wanted - cut_off) | reached:
            self._report(peer, True)
        self._cut_off = cut_off - reached

    def _connects_to(self, peer: int) -> bool:
        return self._rank < peer or self._looks[peer] % LATER == 0

    def close(self) -> None:
        """End the thread. It may be connecting, so do not wait for it."""
        self._closed.set()
