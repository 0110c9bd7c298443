"""How learners come into a run: at its beginning, later, or back to a rendezvous that was restarted."""

from __future__ import annotations

import logging
from collections.abc import Callable

from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.formation import Formation
from roundelay.cluster.rendezvous.members import NEVER_FORMED, STARTED_AGAIN, Connection, Member, RunSpec
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.requests import Request
from roundelay.cluster.rendezvous.run_tables import RunTables

log = logging.getLogger("roundelay")

AHEAD = 1000  # after a restart: more generations than any learner can be ahead of the one that comes back first


class Registration:
    """Registers learners, and begins the run when no learner is missing any more.

    Args:
        now: the time in seconds.
        tables: of the run.
        drop: called with a living learner, an event and the reason; removes the learner.
        after_finished: a run with the same identity has finished here before.

    Attributes:
        formation: what is known of the run before all of its learners have come.
        recovering: after a restart: some learners have not yet sent the numbers they used.
        files: by learner, where its supervisor serves the files of its directory.
    """

    def __init__(
        self,
        now: Callable[[], float],
        tables: RunTables,
        drop: Callable[[int, str, str], None],
        *,
        after_finished: bool = False,
    ) -> None:
        self._now, self._tables, self._drop = now, tables, drop
        self.formation = Formation(now, after_finished=after_finished)
        self.recovering = False
        self.files: dict[int, Address] = {}
        self._formed_at = 0.0
        self._failed = False  # whether it was reported that the run cannot begin

    def register(self, connection: Connection, message: Message) -> None:
        """Process a registration. The reply may have to wait until the run begins; see `reply`."""
        tables = self._tables
        request = Request.parsed(connection, -1, message)
        wanted = None if message["id"] is None else int(message["id"])
        known, (host, port) = int(message["generation"]), message["address"]
        address, process = (str(host), int(port)), str(message.get("process", ""))
        self._adopt(RunSpec.from_message(message["run"]))
        if message.get("again"):
            self.formation.wait_without_limit()
        formed = tables.members.formed
        if formed and known != NEVER_FORMED and wanted not in tables.members.living:
            request.reply(dropped=tables.changes.reason_lost(wanted))
            return
        joining, has_weights = formed and known == NEVER_FORMED, bool(message.get("weights"))
        if joining and wanted in tables.members.living:  # the learner was restarted before its death was noticed
            self._drop(wanted, "died", STARTED_AGAIN)
        request.learner = tables.members.assign_id(wanted)
        if not formed and known != NEVER_FORMED:
            self._recover(message, known)
        member = Member(address, connection, process=process, has_weights=has_weights)
        revived = joining and has_weights and not tables.members.living
        tables.members.attach(request.learner, member, joining=joining and not revived)
        if revived:
            tables.changes.joined(request.learner)
        if message.get("files") is not None:
            host, port = message["files"]
            self.files[request.learner] = str(host), int(port)
        tables.heartbeats.heard(request.learner)
        if known != NEVER_FORMED and message.get("total") is not None:
            tables.budget.declare(request.learner, int(message["total"]), message["used"])
            if message["group"] is not None:
                drawn, done = dict(message["drawn"]), int(message["done"])
                tables.budget.received(request.learner, int(message["group"]), drawn, done)
        tables.requests.add(request)
        self.formation.comes(request.learner, process)
        self.form()
        self.update_recovering()

    def never_comes(self, name: object, learner: int | None, event: str, reason: str) -> None:
        """A process has ended before the run has begun; `name` is its learner, or, if that is not known, the process."""
        self.formation.never_comes(name, reason)
        self._tables.changes.report(event, learner, reason)
        self.form()

    def form(self) -> None:
        """Begin the run if no learner is missing any more; if the run can never begin, tell all learners that wait."""
        if self._tables.members.formed:
            return
        self.formation.give_up(self._tables.members.living)
        if failure := self.formation.failure:
            if not self._failed:
                self._failed = True
                self._tables.changes.report("stopping", None, failure)
            self._tables.requests.answer(lambda request: {"refused": failure} if request.kind == "register" else None)
        elif self.formation.complete(self._tables.members.living):
            self._tables.members.form()
            self._formed_at = self._now()

    def update_recovering(self) -> None:
        """After a change of the connections: the run is recovered when all living learners have come back."""
        self.recovering = self.recovering and not self._tables.members.all_connected

    def reply(self, learner: int) -> Message | None:
        """The reply to a registration; None before the run has begun."""
        members = self._tables.members
        if not members.formed:
            return None
        view, joining = members.view(), members.joining.get(learner)
        if joining is not None:
            view["living"][str(learner)] = joining.address
        more = {"id": learner, "elapsed_s": self._now() - self._formed_at, "given": self._tables.budget.given}
        return view | more | {"joining": joining is not None, "begun": members.begun}

    def _adopt(self, run: RunSpec) -> None:
        self.formation.adopt(run)
        assert self.formation.run is not None
        self._tables.stop.agreement.stop_groups = self.formation.run.stop_groups
        self._tables.changes.min_learners = self.formation.run.min_learners

    def _recover(self, message: Message, known: int) -> None:
        """After a restart, rebuild the state of a run under way from the first learner that comes back."""
        members = self._tables.members
        members.generation, self.recovering, self._formed_at = known + AHEAD, True, self._now()
        log.warning("the rendezvous takes over a run that is under way, in generation %d", members.generation)
        for other, (host, port) in message["living"].items():
            members.living[members.assign_id(int(other))] = Member((host, port), None, self._now())
