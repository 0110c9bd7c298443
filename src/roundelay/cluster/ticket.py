"""A ticket: all that a process must know to take part in an elastic run."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.cluster.membership import Address
from roundelay.errors import LaunchError
from roundelay.transport.security import KEYS, Security

TICKET = "ROUNDELAY_TICKET"  # environment variable: the text of a ticket, or the path of a file with it


@dataclass(frozen=True)
class Ticket:
    """Where the rendezvous of a run is, and how to prove that a process belongs to the run. A ticket holds the secret.

    A ticket can be pickled. `str(ticket)` is one line of JSON for a file or for the variable ROUNDELAY_TICKET.

    Attributes:
        address: of the rendezvous.
        security: the secret of the run, as `Security.environment` gives it.
        learners: how many learners begin together. Learners that come later join.
        min_learners: with fewer living learners the run stops.
        run: the identity of the run. The rendezvous refuses learners of another run.

    >>> ticket = Ticket(("10.0.0.1", 29400), {"ROUNDELAY_SECRET": 32 * "0"}, learners=4)
    >>> Ticket.parse(str(ticket)) == ticket
    True
    """

    address: Address
    security: dict[str, str]
    learners: int
    min_learners: int = 1
    run: str = ""

    def __str__(self) -> str:
        host, port = self.address
        fields = {"address": [host, port], "learners": self.learners, "min_learners": self.min_learners}
        return json.dumps(fields | {"run": self.run, "security": self.security})

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Read a ticket from its text, or from the file that has it. Raises LaunchError if it is no ticket."""
        if not text.lstrip().startswith("{"):
            try:
                text = Path(text).read_text()
            except OSError as error:
                raise LaunchError(f"cannot read the ticket '{text}': {error.strerror}") from None
        try:
            return cls._from_fields(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise LaunchError(
                f"this is no ticket of a run ({error}); write str(ticket) to a file and name it"
            ) from None

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Ticket:
        host, port = fields["address"]
        known = {name: str(value) for name, value in fields["security"].items() if name in KEYS}
        learners, least = int(fields["learners"]), int(fields["min_learners"])
        ticket = cls((str(host), int(port)), known, learners, least, str(fields["run"]))
        if not 1 <= ticket.min_learners <= ticket.learners:
            raise ValueError(f"min_learners is {ticket.min_learners} of {ticket.learners} learners")
        return ticket

    @classmethod
    def from_environment(cls) -> Ticket | None:
        """The ticket that ROUNDELAY_TICKET names; None if the variable is not set."""
        text = os.environ.get(TICKET)
        return None if text is None else cls.parse(text)

    def credentials(self) -> Security:
        """The secret of the run, and its certificate if it uses TLS. Raises LaunchError if the ticket has no secret."""
        security = Security.from_environment(self.security)
        if security is None:
            raise LaunchError("the ticket has no secret; use the ticket of a Rendezvous")
        return security

    def write(self, path: Path) -> None:
        """Write the ticket to a new file that only its owner can read."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{self}\n")
