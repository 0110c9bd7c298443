"""Heartbeats as a value: who was heard when. No sockets here, so that it can be tested on any clock."""

from __future__ import annotations

from collections.abc import Callable

BEAT_S = 0.5
# Ten beats. A machine under heavy load delays a thread by a second or two, hardly ever by five.
SILENCE_S = 5.0
QUIET_S = 1.5  # three beats: no reason to give a peer up, but one not to wait for it
SILENT = f"no heartbeat for {SILENCE_S:g} s"


class Heartbeats:
    """When each peer was last heard; a peer is lost once it has been silent for `SILENCE_S`.

    Beats come from a peer's transport thread, so a long step, a compilation or an evaluation never looks like death.
    Time in which we ourselves stood still (a suspended machine, SIGSTOP) does not count against anyone.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._heard: dict[int, float] = {}
        self._looked = now()

    def heard(self, peer: int) -> None:
        """Something came from `peer`."""
        self._heard[peer] = self._now()

    def forget(self, peer: int) -> None:
        """`peer` left or was given up; its silence means nothing any more."""
        self._heard.pop(peer, None)

    def silent(self) -> list[int]:
        """Peers whose heartbeats have stopped. To be called about once a `BEAT_S`."""
        now = self._now()
        slept = now - self._looked - BEAT_S
        self._looked = now
        if slept > SILENCE_S / 2:
            self._heard = {peer: last + slept for peer, last in self._heard.items()}
        return self._unheard_for(SILENCE_S)

    def quiet(self) -> set[int]:
        """Peers that have missed some beats. To be called after `silent`, which sees to time in which we stood still."""
        return set(self._unheard_for(QUIET_S))

    def _unheard_for(self, seconds: float) -> list[int]:
        now = self._now()
        return [peer for peer, last in self._heard.items() if now - last > seconds]
