"""Changes of the membership: announced to the learners, reported as events, and timed until all have adopted them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roundelay.cluster.rendezvous.members import Members
from roundelay.cluster.rendezvous.messages import Message

log = logging.getLogger("roundelay")


@dataclass
class _UnhealedChange:
    """One or more changes that not all living learners have adopted yet; `since` is the time of the first."""

    since: float
    reasons: list[str] = field(default_factory=list)


class MembershipChanges:
    """Announces changes, and counts generations. Update the table of members before you call a method of this class.

    Args:
        members: the table of learners.
        now: the time in seconds.
        on_event: called with every event: died, dropped, left, joined, recovered, stopping.

    Attributes:
        min_learners: with fewer living learners all are told to save and stop.
    """

    def __init__(self, members: Members, now: Callable[[], float], on_event: Callable[[Message], None]) -> None:
        self._members, self._now, self._on_event = members, now, on_event
        self.min_learners = 1
        self._reasons: dict[int, str] = {}
        self._unhealed_change: _UnhealedChange | None = None
        self._stopping = False

    def joined(self, learner: int) -> None:
        """A learner has become ready for its peers."""
        self.report("joined", learner)
        self._announce(f"learner {learner} joined")
        self._members.living[learner].joined_in = self._members.generation

    def left(self, learner: int) -> None:
        """A learner has finished and left. This is no fault."""
        self.report("left", learner)
        self._announce("")

    def lost(self, learner: int, event: str, reason: str, returned: int) -> None:
        """A learner has "died" or was "dropped"; `returned` numbers of the budget will be given out again."""
        self._reasons[learner] = reason
        self.report(event, learner, reason, returned=returned)
        self._announce(f"learner {learner} {event}: {reason}")
        living = len(self._members.living)
        if 0 < living < self.min_learners and not self._stopping:
            self._stopping = True
            too_few = f"{living} learners live, fewer than the {self.min_learners} that the run needs"
            self.report("stopping", learner, too_few)
            self._members.send_to_living({"kind": "stop", "reason": too_few})

    def reason_lost(self, learner: int | None) -> str:
        """Why the run goes on without `learner`."""
        return self._reasons.get(-1 if learner is None else learner, "it was not heard for too long")

    def adopted(self, learner: int, generation: int) -> None:
        """A living learner trains with the view of this generation."""
        self._members.living[learner].adopted = generation
        self._check_recovered()

    def report(self, event: str, learner: int | None, reason: str = "", **more: Any) -> None:  # noqa: ANN401
        """Log an event, and hand it to `on_event`."""
        subject = "the run" if learner is None else f"learner {learner}"
        log.info("%s: %s%s", subject, event, f" ({reason})" if reason else "")
        living = len(self._members.living)
        self._on_event({"kind": "event", "event": event, "learner": learner, "reason": reason, "living": living} | more)

    def _announce(self, reason: str) -> None:
        self._members.generation += 1
        if reason:
            self._unhealed_change = self._unhealed_change or _UnhealedChange(self._now())
            self._unhealed_change.reasons.append(reason)
        self._members.send_to_living({"kind": "view", "reason": reason} | self._members.view())
        self._check_recovered()

    def _check_recovered(self) -> None:
        change, living = self._unhealed_change, self._members.living.values()
        if change and living and all(member.adopted >= self._members.generation for member in living):
            self._unhealed_change = None
            self.report("recovered", None, "; ".join(change.reasons), seconds=round(self._now() - change.since, 3))
