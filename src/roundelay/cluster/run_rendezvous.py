"""The rendezvous of a run as the launcher of one machine sees it: in this process (`Rendezvous`), or elsewhere."""

from __future__ import annotations

from typing import Protocol

from roundelay.cluster.rendezvous.session import RendezvousSession
from roundelay.cluster.ticket import Ticket
from roundelay.errors import RendezvousLostError


class RunRendezvous(Protocol):
    """What a launcher asks of the rendezvous of its run."""

    ticket: Ticket

    def died(self, learner: int | None, reason: str, process: str) -> None:
        """A process has ended; its learner may not have registered, and then its id may be unknown."""

    def waiting(self) -> str:
        """Which learners have come, which have not, and where they connect to; empty if none is missing."""

    def stop(self, reason: str) -> None:
        """Have the learners of all machines save and stop, if this machine runs the rendezvous. Safe in a signal handler."""

    def close(self) -> None:
        """End the server or the connection."""


class RemoteRendezvous:
    """A rendezvous that another process runs. A signal to this machine's launcher does not stop other machines.

    Raises RendezvousLostError if it cannot be reached, HandshakeError if it has another secret.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._session = RendezvousSession(ticket.address, ticket.credentials())

    def died(self, learner: int | None, reason: str, process: str) -> None:
        """Tell the rendezvous."""
        self._session.report_death(process, reason, self.ticket.run)

    def waiting(self) -> str:
        """Ask the rendezvous."""
        try:
            missing = self._session.ask_for_info().get("waiting", "")
        except RendezvousLostError:
            missing = "the rendezvous is away"
        return missing and "waiting at {}:{}: {}".format(*self.ticket.address, missing)

    def stop(self, reason: str) -> None:
        """The learners of other machines go on."""

    def close(self) -> None:
        """End the connection."""
        self._session.close()
