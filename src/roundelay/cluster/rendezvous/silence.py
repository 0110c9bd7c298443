"""Which learners of a run are lost, because they are silent or their connection broke."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roundelay.cluster.rendezvous.members import Members
from roundelay.transport.heartbeats import NO_HEARTBEAT, SILENT_AFTER_S, Heartbeats

AWAY_S = 2.0  # a learner whose connection broke may come back within this time
# If all learners are silent at once, they stand still together, or the rendezvous is cut off. That time counts against none of
# them, up to this limit.
ALL_SILENT_S = 60.0


class Silence:
    """Says which learners are lost.

    Args:
        members: the table of learners.
        heartbeats: when each learner was heard last.
        now: the time in seconds.
    """

    def __init__(self, members: Members, heartbeats: Heartbeats, now: Callable[[], float]) -> None:
        self._members, self._heartbeats, self._now = members, heartbeats, now
        self._heard_at = now()  # when a learner that has weights was heard last

    def lost(self) -> Iterator[tuple[int, str, str]]:
        """Learners, living or joining, that are lost since the last call, each with the event and the reason."""
        lost, silent = self._heartbeats.lost(), self._heartbeats.unheard_for(SILENT_AFTER_S)
        if self._members.with_weights - set(silent):
            self._heard_at = self._now()
        elif self._now() - self._heard_at < ALL_SILENT_S:
            self._heartbeats.excuse_all()
            lost = []
        for learner in lost:
            yield learner, "dropped", NO_HEARTBEAT
        for learner, member in list(self._members.living.items()):
            member.away_since += self._heartbeats.stood_still_s
            if member.connection is None and self._now() - member.away_since > AWAY_S:
                yield learner, "died", f"its connection broke and it did not come back within {AWAY_S:g} s"
