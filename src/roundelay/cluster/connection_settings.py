"""How the learners of a run find and trust each other."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from roundelay.cluster.environment import LOOPBACK
from roundelay.cluster.membership import Address
from roundelay.transport.security import Security


@dataclass(frozen=True)
class ConnectionSettings:
    """How the learners of a run find and trust each other.

    Attributes:
        security: the secret of the run, and its certificate if it uses TLS.
        rendezvous: address of the rendezvous; None lets the launcher run it.
        host: the interface to listen on. None is the loopback, or, with a rendezvous elsewhere, the interface that leads there.
        open_collectives: allow collectives, which have no authentication, on an interface other than the loopback.
    """

    security: Security
    rendezvous: Address | None = None
    host: str | None = None
    open_collectives: bool = False

    @property
    def server_host(self) -> str:
        """The interface on which this machine runs a rendezvous."""
        return self.host or LOOPBACK

    @property
    def collectives_allowed(self) -> bool:
        """Whether a rendezvous of this machine allows Gloo and NCCL."""
        return self.open_collectives or self.server_host == LOOPBACK

    @classmethod
    def on_this_machine(cls) -> ConnectionSettings:
        """Settings for a run on the loopback interface only, with a new secret."""
        return cls(Security(secrets.token_bytes(32)))
