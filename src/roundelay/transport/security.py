"""What the ends of a connection must have in common."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Security:
    """What every connection of a run must prove to know.

    Attributes:
        secret: of this run, or of several that do not trust anybody else; see `run`.
        run: the run's name, for runs that share a secret: their learners refuse each other.
    """

    secret: bytes = field(repr=False)
    run: str = ""

    def key(self, purpose: bytes) -> bytes:
        """A key of this run, for one purpose only."""
        return hmac.digest(self.secret, b"roundelay\0" + purpose + b"\0" + self.run.encode(), "sha256")
