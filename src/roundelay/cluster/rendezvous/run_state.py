"""What a rendezvous decides about one run. There are no sockets and no clock here, so that tests can drive it.

A learner registers. From then on it sends requests: for the next number of the budget, for the step to stop at, or to wait at a
barrier for all living learners. A learner that is silent for too long, or whose process has ended, is dropped. Then the
others receive the next generation of the membership, and the unfinished numbers of the lost learner are given out again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from roundelay.cluster.rendezvous.barrier import Barrier
from roundelay.cluster.rendezvous.budget import SharedBudget
from roundelay.cluster.rendezvous.changes import MembershipChanges
from roundelay.cluster.rendezvous.formation import Formation, sentence
from roundelay.cluster.rendezvous.members import NEVER_FORMED, STARTED_AGAIN, Connection, Member, Members, RunSpec
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.requests import KINDS, PendingRequests, Request
from roundelay.cluster.rendezvous.run_stop import RunStop
from roundelay.transport.heartbeats import NO_HEARTBEAT, Heartbeats

log = logging.getLogger("roundelay")

AWAY_S = 2.0  # a learner whose connection broke may come back within this time


class RunState:
    """Decides which learners take part in one run, and answers their requests. Only one thread may use it.

    Args:
        now: the time in seconds.
        on_event: called with every event: waiting, died, dropped, left, joined, recovered, stopping.
        info: what a process may ask for before it registers, such as the run's directory.
        first_generation: of the run; larger than all generations of earlier runs at the same rendezvous.
    """

    def __init__(
        self,
        now: Callable[[], float],
        on_event: Callable[[Message], None],
        info: Message,
        first_generation: int = 0,
    ) -> None:
        self._now, self._info = now, info
        self._members, self._requests = Members(first_generation), PendingRequests()
        self._formation = Formation(now)
        self._changes = MembershipChanges(self._members, now, on_event)
        self._barrier = Barrier(self._members, self._requests, self._drop)
        self._budget, self._stop, self._heartbeats = SharedBudget(), RunStop(self._members), Heartbeats(now)
        self._formed_at = 0.0
        self._recovering = False  # after a restart: some learners have not yet sent the numbers they used
        self._failed = False  # whether it was reported that the run cannot begin

    @property
    def identity(self) -> str:
        """The identity of the run; empty before the first learner has come."""
        return self._formation.identity

    @property
    def over(self) -> bool:
        """Whether all learners of the run have left or are lost."""
        return not self._members.living and not self._members.joining

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
            self._register(connection, message)
        elif learner is not None:
            self._heartbeats.heard(learner)
            self._handle_registered(connection, learner, message)
        self._reply_where_possible()

    def _handle_registered(self, connection: Connection, learner: int, message: Message) -> None:
        kind = message["kind"]
        if learner in self._members.joining and kind in ("ready", "barrier"):
            self._members.admit(learner)
            self._changes.joined(learner)
        if kind in KINDS:
            request = Request.parsed(connection, learner, message)
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
            self._formation.never_comes(process if found is None else found, reason)
            self._changes.report("died", found, reason)
            self._form()
        self._reply_where_possible()

    def stop(self, reason: str) -> None:
        """All learners save and stop; learners that have joined, too. No other learner may join any more."""
        self._stop.everything(reason)

    def tick(self) -> None:
        """To be called about once a heartbeat: drop learners that are silent or away for too long."""
        for learner in self._heartbeats.lost():
            if learner in self._members.living:
                self._drop(learner, "dropped", NO_HEARTBEAT)
            else:
                self._members.end_joining(learner)
        now = self._now()
        for learner, member in list(self._members.living.items()):
            if member.connection is None and now - member.away_since > AWAY_S:
                self._drop(learner, "died", f"its connection broke and it did not come back within {AWAY_S:g} s")
        if not self._members.formed and (missing := self._formation.missing(self._members.living)):
            self._changes.report("waiting", None, missing)
        self._reply_where_possible()
        self._barrier.give_up(self._now())

    # Membership ----------------------------------------------------------------------------------------------------------

    def refusal(self) -> str:
        """Why no learner can register any more; empty if learners can."""
        return f"this run is being stopped ({self._stop.reason})" if self._stop.reason else self._formation.failure

    def _register(self, connection: Connection, message: Message) -> None:
        request = Request.parsed(connection, -1, message)
        wanted = None if message["id"] is None else int(message["id"])
        known, (host, port) = int(message["generation"]), message["address"]
        address, process = (str(host), int(port)), str(message.get("process", ""))
        self._adopt_run(RunSpec.from_message(message["run"]))
        formed = self._members.formed
        if formed and known != NEVER_FORMED and wanted not in self._members.living:
            request.reply(dropped=self._changes.reason_lost(wanted))
            return
        joining = formed and known == NEVER_FORMED
        if joining and wanted in self._members.living:  # the learner was restarted before its death was noticed
            self._drop(wanted, "died", STARTED_AGAIN)
        request.learner = self._members.assign_id(wanted)
        if not formed and known != NEVER_FORMED:
            self._recover(message, known)
        self._members.attach(request.learner, connection, address, joining=joining, process=process)
        self._heartbeats.heard(request.learner)
        self._budget.use(message.get("used", ()))
        self._requests.add(request)
        self._formation.comes(request.learner, process)
        self._form()
        self._recovering = self._recovering and not self._members.all_connected

    def _adopt_run(self, run: RunSpec) -> None:
        self._formation.adopt(run)
        assert self._formation.run is not None
        self._stop.agreement.stop_groups = self._formation.run.stop_groups
        self._changes.min_learners = self._formation.run.min_learners

    def _form(self) -> None:
        """Begin the run if no learner is missing any more; if the run can never begin, tell all learners that wait."""
        if self._members.formed:
            return
        if failure := self._formation.failure:
            if not self._failed:
                self._failed = True
                self._changes.report("stopping", None, failure)
            self._requests.answer(lambda request: {"refused": failure} if request.kind == "register" else None)
        elif self._formation.complete(self._members.living):
            self._members.form()
            self._formed_at = self._now()

    def _recover(self, message: Message, known: int) -> None:
        """After a restart, rebuild the state of a run under way from the first learner that comes back."""
        log.warning("the rendezvous takes over a run that is under way, in generation %d", known + 1)
        self._members.generation, self._recovering, self._formed_at = known + 1, True, self._now()
        for other, (host, port) in message["living"].items():
            self._members.living[self._members.assign_id(int(other))] = Member((host, port), None, self._now())
        if message.get("total") is not None:
            for learner in self._members.living:
                self._budget.declare(learner, int(message["total"]), message.get("used", ()))

    def _leave(self, learner: int, failure: str) -> None:
        if learner in self._members.joining:
            self._changes.report("died", learner, failure)
            self._members.end_joining(learner)
        elif failure:
            self._drop(learner, "died", failure)
        else:
            self._remove(learner)
            self._changes.left(learner)

    def _drop(self, learner: int, event: str, reason: str) -> None:
        returned = self._remove(learner)
        if not self._members.formed:
            self._formation.never_comes(learner, reason)
            self._changes.report(event, learner, reason)
            self._form()
            return
        self._changes.lost(learner, event, reason, returned=len(returned))

    def _remove(self, learner: int) -> list[int]:
        """Forget the learner and its requests; return the numbers that it had drawn but not finished."""
        self._members.remove(learner)
        self._heartbeats.forget(learner)
        self._requests.forget(learner=learner)
        self._recovering = self._recovering and not self._members.all_connected
        return self._budget.give_back(learner)

    # Replies -------------------------------------------------------------------------------------------------------------

    def _reply_where_possible(self) -> None:
        if self._barrier.open():
            self._stop.agreement.clear()
        self._requests.answer(self._answer)

    def _answer(self, request: Request) -> Message | None:
        """The content of the reply; None if the request must wait. `Barrier` replies to barriers."""
        learner, fields = request.learner, request.fields
        match request.kind:
            case "register":
                return self._registered(learner)
            case "budget":
                self._budget.declare(learner, fields["total"], fields["used"])
                return {}
            case "draw" if self._budget.declared_by(self._members.initial) and not self._recovering:
                number, may_come_back = self._budget.draw(learner, fields["group"], fields["index"], fields["done"])
                wait = number is None and may_come_back and fields["patient"]
                return None if wait else {"number": number}
            case "last_step":
                number = self._stop.last_step(learner)
                return None if number is None else {"number": number}
            case "stop_boundary":
                assert self._formation.run is not None
                return {"number": self._stop.boundary(learner, self._budget.given, self._formation.run.expected)}
        return None

    def _registered(self, learner: int) -> Message | None:
        if not self._members.formed:
            return None
        view, joining = self._members.view(), self._members.joining.get(learner)
        if joining is not None:
            view["living"][str(learner)] = joining.address
        elapsed_s = self._now() - self._formed_at
        more = {"id": learner, "info": self._info, "elapsed_s": elapsed_s, "given": self._budget.given}
        return view | more | {"joining": joining is not None}
