"""What a rendezvous decides: which run it serves, and which learners belong to that run. See `RunState` for one run."""

from __future__ import annotations

from collections.abc import Callable

from roundelay.cluster.rendezvous.members import NEVER_FORMED, Connection, RunSpec
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.requests import Request
from roundelay.cluster.rendezvous.run_state import RunState


class RendezvousState:
    """Serves one run after the other. Only one thread may use it.

    A learner of another run is refused while a learner of this run lives.

    Args:
        now: the time in seconds.
        on_event: called with every event: waiting, died, dropped, left, joined, recovered, stopping.
        info: what a process may ask for before it registers, besides what learners have said about the run.
    """

    def __init__(
        self,
        now: Callable[[], float],
        on_event: Callable[[Message], None] = lambda event: None,
        info: Message | None = None,
    ) -> None:
        self._now, self._on_event, self._info = now, on_event, info or {}
        self._run = RunState(now, on_event)

    @property
    def living(self) -> list[int]:
        """Ids of the living learners."""
        return self._run.living

    def waiting(self) -> str:
        """Which learners have come, and which have not; empty if none is missing, or if no run has begun to form."""
        return self._run.waiting()

    @property
    def generation(self) -> int:
        """Grows with every change of the membership and with every barrier; NEVER_FORMED before the run has begun."""
        return self._run.generation

    def handle(self, connection: Connection, message: Message) -> None:
        """Process a message. Raises KeyError, TypeError or ValueError if it lacks a field or has a wrong one."""
        kind = message["kind"]
        if kind == "info":
            under_way = self._run.generation != NEVER_FORMED and not self._run.over
            run = {"run": self._run.identity, "waiting": self._run.waiting(), "under_way": under_way}
            Request.parsed(connection, -1, message).reply(info=self._info | self._run.about | run)
        elif kind == "process_died":
            if self._run.identity in ("", str(message["run"])):  # empty: no learner of the run has come yet
                self.died(None, str(message["reason"]), str(message["process"]))
        elif kind != "register" or self._admits(connection, message):
            self._run.handle(connection, message)

    def _admits(self, connection: Connection, message: Message) -> bool:
        """Whether the learner belongs to the run of this rendezvous; if not, it is told so.

        If all learners of the last run have left, a learner that does not join starts a new run here.
        """
        identity = RunSpec.from_message(message["run"]).identity
        begins = int(message["generation"]) == NEVER_FORMED and not message.get("joins")
        formed = self._run.generation != NEVER_FORMED
        same = identity == self._run.identity
        ended = self._run.identity and self._run.over
        if begins and ended and (not same or (formed and identity) or self._run.given_up):
            finished = same and (self._run.finished or self._run.given_up)
            self._run = RunState(self._now, self._on_event, self._run.generation + 1, after_finished=finished)
        request = Request.parsed(connection, -1, message)
        if self._run.identity and identity != self._run.identity:
            request.reply(
                refused=f"this rendezvous serves the run '{self._run.identity}', not '{identity}'; wait until "
                "that run has ended, or start another rendezvous"
            )
            return False
        if message.get("weights") and not formed and not self._run.identity:  # this rendezvous was started again
            request.reply(dropped="the rendezvous was started again, and no other learner has come back yet")
            return False
        if message.get("joins") and not self._run.can_be_joined(with_weights=bool(message.get("weights"))):
            request.reply(
                refused="the run has no learner left that this one could join: all have finished or were lost; "
                "resume the run, or start a new one"
            )
            return False
        if refusal := self._run.refusal():
            request.reply(refused=refusal)
            return False
        return True

    def closed(self, connection: Connection) -> None:
        """A connection broke; its learner may come back over another one."""
        self._run.closed(connection)

    def died(self, learner: int | None, reason: str, process: str = "") -> None:
        """A process is known to have ended: that of `learner`, or, if the id is not known, the one with this name."""
        self._run.died(learner, reason, process)

    def stop(self, reason: str) -> None:
        """All learners of the run save and stop."""
        self._run.stop(reason)

    def tick(self) -> None:
        """To be called about once a heartbeat: drop learners that are silent or away for too long."""
        self._run.tick()
