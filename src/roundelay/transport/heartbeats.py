"""Heartbeats as a value: when each peer was last heard. No sockets and no threads, so it can be tested on any clock."""

from __future__ import annotations

from collections.abc import Callable

BEAT_S = 0.5
# Ten beats. Heavy load delays a thread by a second or two, rarely by five.
LOST_AFTER_S = 5.0
SILENT_AFTER_S = 1.5  # three beats: too early to give a peer up, but time to exchange with another one
NO_HEARTBEAT = f"no heartbeat for {LOST_AFTER_S:g} s"


class Heartbeats:
    """When each peer was last heard. A peer is lost once it has been silent for `LOST_AFTER_S`.

    Beats come from a peer's transport thread, so a long step, a compilation or an evaluation never looks like death.
    Time in which this process itself stood still (a suspended machine, SIGSTOP, a machine with too much to do) does not
    count against a peer: between two looks, at most two beats count.

    Attributes:
        stood_still_s: how long this process stood still before the last look.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._heard: dict[int, float] = {}
        self._silent: set[int] = set()
        self._looked = now()
        self._passed_s = self.stood_still_s = 0.0

    def heard(self, peer: int) -> None:
        """Something came from `peer`."""
        self._heard[peer] = self._now()

    def forget(self, peer: int) -> None:
        """`peer` left or was given up: its silence means nothing any more."""
        self._heard.pop(peer, None)

    def lost(self) -> list[int]:
        """Peers whose heartbeats have stopped. Call this about once per `BEAT_S`."""
        now = self._now()
        self._passed_s, self._looked = now - self._looked, now
        late = self._passed_s - BEAT_S
        self.stood_still_s = late if late > BEAT_S else 0.0
        self._excuse(self.stood_still_s)
        return self.unheard_for(LOST_AFTER_S)

    def changes(self) -> tuple[list[int], set[int], set[int]]:
        """Peers that are lost, those that have become silent, and those that are heard again. Instead of `lost`."""
        lost = self.lost()
        silent = set(self.unheard_for(SILENT_AFTER_S)) - set(lost)
        before, self._silent = self._silent, silent
        return lost, silent - before, (before - silent) & self._heard.keys() - set(lost)

    def excuse_all(self) -> None:
        """The time between the last two looks counts against no peer."""
        self._excuse(self._passed_s)

    def _excuse(self, seconds: float) -> None:
        self._heard = {peer: min(last + seconds, self._looked) for peer, last in self._heard.items()}

    def unheard_for(self, seconds: float) -> list[int]:
        """Peers that were heard before, and not in the last `seconds`."""
        now = self._now()
        return [peer for peer, last in self._heard.items() if now - last > seconds]
