"""Peers that live but cannot be reached, such as behind a cut link: a thread connects to them again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from roundelay import threads
from roundelay.transport.base import LEFT

RETRY_S = 2.0


class Healing:
    """Tries to reach lost peers, from `start` until `close`.

    Of two learners that have lost each other, the one with the lower rank connects.

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
        reached = {peer for peer in cut_off if self._rank < peer and self._reach(peer)}
        for peer in (self._cut_off & wanted - cut_off) | reached:
            self._report(peer, True)
        self._cut_off = cut_off - reached

    def close(self) -> None:
        """End the thread. It may be connecting, so do not wait for it."""
        self._closed.set()
