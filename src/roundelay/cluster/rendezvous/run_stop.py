"""How a run is stopped: which learners are asked, with which step they end, and where they save."""

from __future__ import annotations

from collections.abc import Iterable

from roundelay.cluster.rendezvous.members import Members
from roundelay.cluster.rendezvous.stop_agreement import StopAgreement


class RunStop:
    """Asks learners to stop, and agrees with them on the last step and on the name of the checkpoint.

    Args:
        members: the table of learners.

    Attributes:
        agreement: the agreement of learners on their last step.
        reason: why the whole run is being stopped; empty while it is not.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self.agreement = StopAgreement()
        self.reason = ""
        self._boundary: int | None = None
        self._stopped: set[int] = set()  # learners that have asked where to save

    def everything(self, reason: str) -> None:
        """Ask all learners to save and stop; learners that join at the moment, too."""
        self.reason = self.reason or reason
        self._ask([*self._members.living, *self._members.joining], reason)

    def begun(self, learner: int, steps: int) -> None:
        """A learner stops, and has begun `steps` steps. The others of its stop group are asked to stop, too."""
        self.agreement.begun(learner, steps)
        self._ask(self.agreement.not_asked(learner, self._members.living), f"learner {learner} stops")

    def last_step(self, learner: int) -> int | None:
        """The number of steps with which the stop group of `learner` ends; None until all its members have replied."""
        return self.agreement.last_step(learner, self._members.living)

    def boundary(self, learner: int, given: int, expected: int) -> int:
        """Where `learner` saves: how far the budget was given out when the first learner asked.

        Once all of the `expected` learners that began the run stop, those that joined it are asked to stop, too.
        """
        if self._boundary is None:
            self._boundary = given
        self._stopped.add(learner)
        going_on = self._members.living.keys() - self._stopped
        if all(other >= expected for other in going_on):
            self._ask(going_on, "all learners that began the run stop")
        return self._boundary

    def _ask(self, learners: Iterable[int], reason: str) -> None:
        for learner in learners:
            member = self._members.living.get(learner) or self._members.joining.get(learner)
            if member is not None and member.connection is not None:
                member.connection.send({"kind": "stop", "reason": reason})
