"""The replies of the rendezvous to the requests of learners."""

from __future__ import annotations

from roundelay.cluster.rendezvous.barrier import Barrier
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.registration import Registration
from roundelay.cluster.rendezvous.requests import Request
from roundelay.cluster.rendezvous.run_tables import RunTables


class Replies:
    """Replies to each request as soon as its answer is known.

    Args:
        tables: of the run.
        registration: answers learners that register.
        barrier: answers learners that wait at it.
    """

    def __init__(self, tables: RunTables, registration: Registration, barrier: Barrier) -> None:
        self._tables, self._registration, self._barrier = tables, registration, barrier

    def send(self) -> None:
        """Reply to all requests whose answer is known now. To be called after every change of the run."""
        if self._barrier.open():
            self._tables.stop.agreement.clear()
        self._tables.requests.answer(self._answer)

    def _answer(self, request: Request) -> Message | None:
        """The content of the reply; None if the request must wait. `Barrier` replies to barriers."""
        learner, fields = request.learner, request.fields
        match request.kind:
            case "register":
                return self._registration.reply(learner)
            case "budget":
                self._tables.budget.declare(learner, fields["total"], fields["used"])
                return {}
            case "draw" if self._numbers_are_known():
                number, may_come_back = self._tables.budget.draw(
                    learner, fields["group"], fields["index"], fields["done"]
                )
                wait = number is None and may_come_back and fields["patient"]
                return None if wait else {"number": number}
            case "last_step":
                number = self._tables.stop.last_step(learner)
                return None if number is None else {"number": number}
            case "stop_boundary":
                run = self._registration.formation.run
                assert run is not None
                return {"number": self._tables.stop.boundary(learner, self._tables.budget.given, run.expected)}
        return None

    def _numbers_are_known(self) -> bool:
        """Whether all have said what they have used, except learners that cannot, as they wait for the others to meet."""
        silent = self._tables.requests.at_barrier().keys()
        budget, initial = self._tables.budget, set(self._tables.members.initial)
        return budget.declared and budget.declared_by(initial - silent) and not self._registration.recovering
