"""What a learner asks of the rendezvous. A learner that loses the rendezvous goes on training and reconnects by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from roundelay import waiting
from roundelay.cluster.membership import Address, Membership, View
from roundelay.cluster.rendezvous.budget_client import BudgetClient
from roundelay.cluster.rendezvous.members import NEVER_FORMED, RunSpec
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.session import RendezvousSession
from roundelay.cluster.rendezvous.stop_client import StopClient
from roundelay.errors import DroppedError, MissingLearnersError
from roundelay.transport.security import Security

log = logging.getLogger("roundelay")


class RendezvousClient(RendezvousSession):
    """A learner's client of the rendezvous.

    Methods that need a reply block until it comes. They raise DroppedError if the run goes on without this learner.
    `barrier` and `budget.declare` survive a reconnection, and raise RendezvousLostError only if the rendezvous is
    unreachable for longer than `PATIENCE_S`. `register` and `rejoin` raise it as soon as the connection is lost.
    `budget.draw`, `stop.last_step` and `stop.boundary` have a fallback instead.

    Args:
        address: of the rendezvous.
        security: the secret of the run.
        on_view: called with every new view and the reason for the change, in the connection's thread.
        on_stop: called with the reason when the run is to be saved and stopped, in the connection's thread.

    Attributes:
        budget: the learner's part of the budget of the run.
        stop: how learners that stop agree with each other.
        view: the newest view; None before `register`.
        joining: whether the run was under way when this learner registered; False after `ready`, which tells the peers.
        begun: whether another learner trained already when this learner registered.
        given: how far the budget was drawn when this learner registered.
        registrations: how often this learner has registered; more than once if it was dropped.
    """

    def __init__(
        self,
        address: Address,
        security: Security,
        on_view: Callable[[View, str], None] = lambda view, reason: None,
        on_stop: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.on_view, self.on_stop = on_view, on_stop
        self.view: View | None = None
        self.joining = self.begun = False
        self.given = self.registrations = 0
        self._run_began = 0.0  # on the clock of this learner
        self._own_address: Address = ("", 0)
        self._run: Message = {}
        self._process = ""
        self._files: Address | None = None
        super().__init__(address, security)
        self.budget, self.stop = BudgetClient(self._ask, self._position), StopClient(self._ask)

    def check(self) -> None:
        """Raise DroppedError if the run goes on without this learner."""
        if self._connection.dropped is not None:
            raise DroppedError(self._connection.dropped)

    @property
    def dropped(self) -> str | None:
        """Why the run goes on without this learner; None if it does not."""
        return self._connection.dropped

    @property
    def elapsed_s(self) -> float:
        """Seconds since all learners that began together had registered."""
        return waiting.now() - self._run_began

    # Membership ----------------------------------------------------------------------------------------------------------

    def register(
        self,
        run: RunSpec,
        address: Address,
        wanted: int | None,
        *,
        joins: bool = False,
        process: str = "",
        files: Address | None = None,
        again: bool = False,
    ) -> View:
        """Take part as learner `wanted`, or with an id that the rendezvous chooses.

        Waits until all learners that begin together have registered.

        Args:
            run: the same from every learner.
            address: where this learner listens for peers.
            wanted: the id.
            joins: the run must be under way.
            process: the name under which the supervisor reports the end of this process.
            files: where the supervisor serves the files of its directory to other machines.
            again: this process took part in the last run at this rendezvous, and begins the next one.

        Raises LaunchError if the rendezvous serves another run, or if this run cannot begin or be joined.
        """
        self._run, self._process, self._files = asdict(run), process, files
        return self._register(address, wanted, joins=joins, again=again)

    def rejoin(self, address: Address, *, weights: bool) -> View:
        """Register again after DroppedError, with the same id.

        If this learner has `weights` of the run, and all others were lost, too, it goes on with them: `joining` is False.
        """
        return self._register(address, self.id, joins=True, weights=weights)

    def _register(
        self, address: Address, wanted: int | None, *, joins: bool, again: bool = False, weights: bool = False
    ) -> View:
        self._own_address, self._connection.dropped = address, None
        flags = {"joins": joins, "again": again, "weights": weights}
        reply = self._ask("register", id=wanted, **self._about(NEVER_FORMED), **flags)
        self.id, self.view = int(reply["id"]), View.from_message(reply)
        self.joining, self.begun = bool(reply["joining"]), bool(reply["begun"])
        self.registrations += 1
        self.budget.known.register_again()
        self.budget.declared = False
        self._run_began, self.given = waiting.now() - float(reply["elapsed_s"]), int(reply["given"])
        return self.view

    def _about(self, generation: int) -> Message:
        """What this learner says of itself whenever it registers."""
        about = {"run": self._run, "process": self._process, "files": self._files}
        return about | {"address": self._own_address, "generation": generation}

    def ready(self) -> None:
        """Say that this learner, which joins, can be reached by its peers."""
        self.joining = False
        self._connection.send({"kind": "ready"})

    def confirm_view(self) -> None:
        """Say that this learner trains with the newest view."""
        if self.view is not None:
            self._connection.send({"kind": "view_adopted", "generation": self.view.membership.generation})

    def barrier(
        self,
        generation: int,
        value: Any = None,  # noqa: ANN401
        lost: Sequence[int] = (),
        address: Address | None = None,
        timeout_s: float | None = None,
    ) -> View:
        """Wait until all living learners are at the barrier; they form the next generation.

        Args:
            generation: the generation of this learner until now.
            value: any JSON value; every learner finds all values in the view.
            lost: peers of that generation that this learner cannot reach any more.
            address: where this learner listens from now on, if that has changed.
            timeout_s: how long to wait.

        Raises MissingLearnersError if not all learners have come within `timeout_s`.
        """
        self._own_address = address or self._own_address
        fields: Message = {"value": value, "lost": list(lost), "generation": generation, "timeout_s": timeout_s}
        reply = self._ask("barrier", repeat=True, address=self._own_address, **fields)
        if "missing" in reply:
            raise MissingLearnersError(timeout_s or 0.0, reply["missing"])
        view = View.from_message(reply)
        if self.view is None or view.membership.generation > self.view.membership.generation:
            self.view = view  # else the next view has come already
        return view

    # The connection ------------------------------------------------------------------------------------------------------

    def _received(self, message: Message) -> None:
        if message["kind"] == "view":
            self._adopt(View.from_message(message), message["reason"])
        elif message["kind"] == "stop":
            self.on_stop(message["reason"])

    def _position(self) -> tuple[int, Membership]:
        assert self.id is not None
        assert self.view is not None
        return self.id, self.view.membership

    def _adopt(self, view: View, reason: str) -> None:
        if self.view is not None and view.membership.generation > self.view.membership.generation:
            self.view = view
            self.on_view(view, reason)

    def _reconnected(self) -> None:
        """After a reconnection, send all that the rendezvous needs if it was restarted."""
        if self.view is None:
            return
        membership, addresses, budget = self.view.membership, self.view.addresses, self.budget.known
        living = {str(learner): addresses[learner] for learner in membership.living}
        used: Message = {"total": budget.total, "used": budget.used, "group": budget.group, "done": budget.done}
        registered = self._connection.request(
            "register",
            id=self.id,
            **self._about(membership.generation),
            living=living,
            drawn=list(budget.drawn.items()),
            **used,
        )
        registered.add_done_callback(self._registered_again)

    def _registered_again(self, registered: Future[Message]) -> None:
        if registered.exception() is not None:
            return
        reply = registered.result()
        reason = reply.get("dropped", reply.get("refused"))
        if reason is not None:
            log.warning("learner %s was dropped: %s", self.id, reason)
            self._connection.drop(reason)
            return
        log.info("learner %s has found the rendezvous again", self.id)
        self._adopt(View.from_message(reply), "the rendezvous is back")
