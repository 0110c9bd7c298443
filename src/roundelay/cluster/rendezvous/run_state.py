"""What a rendezvous decides about one run. There are no sockets and no clock here, so that tests can drive it.

A learner registers. From then on it sends requests: for the next number of the budget, for the step to stop at, or to wait at a
barrier for all living learners. A learner that is silent for too long, or whose process has ended, is dropped. Then the
others receive the next generation of the membership, and the unfinished numbers of the lost learner are given out again.
"""

from __future__ import annotations

from collections.abc import Callable

from roundelay.cluster.rendezvous.barrier import Barrier
from roundelay.cluster.rendezvous.budget import SharedBudget
from roundelay.cluster.rendezvous.changes import MembershipChanges
from roundelay.cluster.rendezvous.formation import sentence
from roundelay.cluster.rendezvous.members import Connection, Members
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.registration import Registration
from roundelay.cluster.rendezvous.replies import Replies
from roundelay.cluster.rendezvous.requests import KINDS, PendingRequests, Request
from roundelay.cluster.rendezvous.run_stop import RunStop
from roundelay.cluster.rendezvous.run_tables import RunTables
from roundelay.cluster.rendezvous.silence import Silence
from roundelay.transport.heartbeats import Heartbeats


class RunState:
    """Decides which learners take part in one run, and answers their requests. Only one thread may use it.

    Args:
        now: the time in seconds.
        on_event: called with every event: waiting, died, dropped, left, joined, recovered, stopping.
        first_generation: of the run; larger than all generations of earlier runs at the same rendezvous.
        after_finished: a run with the same identity has finished here before.

    Attributes:
        finished: whether a learner has finished its part and left.
    """

    def __init__(
        self,
        now: Callable[[], float],
        on_event: Callable[[Message], None],
        first_generation: int = 0,
        *,
        after_finished: bool = False,
    ) -> None:
        self.finished = False
        self._now = now
        self._members, self._requests = Members(first_generation), PendingRequests()
        self._changes = MembershipChanges(self._members, now, on_event)
        self._budget, self._stop, self._heartbeats = SharedBudget(), RunStop(self._members), Heartbeats(now)
        tables = RunTables(self._members, self._requests, self._changes, self._budget, self._stop, self._heartbeats)
        self._registration = Registration(now, tables, self._drop, after_finished=after_finished)
        self._formation = self._registration.formation
        self._silence = Silence(self._members, self._heartbeats, now)
        self._barrier = Barrier(self._members, self._requests, self._drop)
        self._replies = Replies(tables, self._registration, self._barrier)

    @property
    def identity(self) -> str:
        """The identity of the run; empty before the first learner has come."""
        return self._formation.identity

    @property
    def about(self) -> Message:
        """What the learners have said about the run, and where their supervisors serve files."""
        files = {str(learner): address for learner, address in self._registration.files.items()}
        return {} if self._formation.run is None else dict(self._formation.run.about) | {"files": files}

    @property
    def over(self) -> bool:
        """Whether all learners of the run have left or are lost."""
        return not self._members.living and not self._members.joining

    def can_be_joined(self, *, with_weights: bool) -> bool:
        """Whether a learner can join. One `with_weights` was dropped; it can go on without others if none has finished."""
        if not self._members.formed or (self.finished and self._members.only_newcomers):
            return False
        return with_weights or bool(self._members.with_weights)

    @property
    def given_up(self) -> bool:
        """Whether learners that came after a finished run have waited too long for others."""
        return self._formation.given_up and not self._members.formed

    @property
    def living(self) -> list[int]:
        """Ids of the living learners."""
        return sorted(self._members.living)

    @property
    def generation(self) -> int:
        """Grows with every change of the membership and with every barrier; NEVER_FORMED before the run has begun."""
        return self._members.generation

    def waiting(self) -> str:
        """Which learners have come, and which have not; empty if none is missing, or if none has come."""
        run = self._formation.run
        return "" if run is None or self._members.formed else sentence(run.expected, self.living)

    # Input ---------------------------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, message: Message) -> None:
        """Process a message. Raises KeyError, TypeError or ValueError if it lacks a field or has a wrong one."""
        learner = self._members.learner_of(connection)
        if message["kind"] == "register":
            self._registration.register(connection, message)
        elif learner is not None:
            self._heartbeats.heard(learner)
            self._handle_registered(connection, learner, message)
        self._replies.send()

    def _handle_registered(self, connection: Connection, learner: int, message: Message) -> None:
        kind = message["kind"]
        if learner in self._members.joining and kind in ("ready", "barrier"):
            self._admit(learner, trains=kind == "ready")
        if learner not in self._members.living and learner not in self._members.joining:
            return  # it came too late
        if kind in KINDS:
            request = Request.parsed(connection, learner, message)
            if kind == "barrier" and self._barrier.repeated(request):
                return
            if kind == "last_step":
                self._stop.begun(learner, request.fields["begun"])
            if message.get("timeout_s") is not None:
                request.give_up_at = self._now() + float(message["timeout_s"])
            self._requests.add(request)
        elif kind == "view_adopted":
            if learner in self._members.living:
                self._changes.adopted(learner, int(message["generation"]))
        elif kind == "leave":
            self._leave(learner, message["failure"])
        elif kind not in ("heartbeat", "ready"):
            raise ValueError(f"learners send no message of kind '{kind}'")

    def closed(self, connection: Connection) -> None:
        """A connection broke; its learner may come back over another one."""
        learner = self._members.detach(connection, self._now())
        self._requests.forget(connection=connection)
        if learner is not None:
            self._heartbeats.forget(learner)

    def died(self, learner: int | None, reason: str, process: str = "") -> None:
        """A process has ended: that of `learner`, or, if the id is not known, the one with this name."""
        found = self._members.learner_in(process) if learner is None else learner
        if found in self._members.living:
            self._drop(found, "died", reason)
        elif found is not None and found in self._members.joining:
            self._members.end_joining(found)
        elif not self._members.formed:
            self._registration.never_comes(process if found is None else found, found, "died", reason)
        self._replies.send()

    def stop(self, reason: str) -> None:
        """All learners save and stop; learners that have joined, too. No other learner may join any more."""
        self._stop.everything(reason)

    def tick(self) -> None:
        """To be called about once a heartbeat: drop learners that are silent or away for too long."""
        for learner, event, reason in self._silence.lost():
            if learner in self._members.living:
                self._drop(learner, event, reason)
            else:
                self._members.end_joining(learner)
        if not self._members.formed and (missing := self._formation.missing(self._members.living)):
            self._changes.report("waiting", None, missing)
        self._registration.form()
        self._replies.send()
        self._barrier.give_up(self._now())

    # Membership ----------------------------------------------------------------------------------------------------------

    def refusal(self) -> str:
        """Why no learner can register any more; empty if learners can."""
        return f"this run is being stopped ({self._stop.reason})" if self._stop.reason else self._formation.failure

    def _leave(self, learner: int, failure: str) -> None:
        if learner in self._members.joining:
            self._changes.report("died", learner, failure)
            self._members.end_joining(learner)
        elif failure:
            self._drop(learner, "died", failure)
        else:
            self.finished = self._members.formed
            self._remove(learner)
            self._changes.left(learner)
            self._end_newcomers()

    def _admit(self, learner: int, *, trains: bool) -> None:
        member = self._members.admit(learner)
        if trains:
            member.adopted = self._members.generation
        self._changes.joined(learner)
        self._end_newcomers()

    def _end_newcomers(self) -> None:
        """If all that had the state of the run have finished, those that came too late must not begin it again."""
        if self.finished and self._members.only_newcomers:
            for learner in self.living:
                self._drop(learner, "dropped", "all other learners have finished")
            for learner in list(self._members.joining):
                self._members.end_joining(learner)

    def _drop(self, learner: int, event: str, reason: str) -> None:
        returned = self._remove(learner)
        if not self._members.formed:
            self._registration.never_comes(learner, learner, event, reason)
            return
        self._changes.lost(learner, event, reason, returned=len(returned))

    def _remove(self, learner: int) -> list[int]:
        """Forget the learner and its requests; return the numbers that it had drawn but not finished."""
        self._members.remove(learner)
        self._barrier.forget(learner)
        self._heartbeats.forget(learner)
        self._requests.forget(learner=learner)
        self._registration.update_recovering()
        return self._budget.give_back(learner)
