"""A connection to the rendezvous that needs no registration. A supervisor uses it; a learner's client is built on it."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.awaited_replies import PATIENCE_S, AwaitedReplies
from roundelay.cluster.rendezvous.connection import ReconnectingConnection
from roundelay.cluster.rendezvous.messages import Message, MessageConnection
from roundelay.cluster.rendezvous.server import RENDEZVOUS
from roundelay.errors import DroppedError, HandshakeError, LaunchError, RendezvousLostError
from roundelay.transport import handshake
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.security import Security


class RendezvousSession:
    """Asks the rendezvous, and connects again by itself whenever the connection is lost.

    Args:
        address: of the rendezvous.
        security: the secret of the run.

    Attributes:
        id: the id of the learner; None before a learner has registered over this connection.
        closed: whether `close` was called.
        failed: whether `close` was called with a failure.

    Raises RendezvousLostError if the rendezvous cannot be reached, HandshakeError if it has another secret.
    """

    def __init__(self, address: Address, security: Security) -> None:
        self._address, self._security = address, security
        self.id: int | None = None
        self.closed = self.failed = False
        try:
            self._connection = self._opened()
        except HandshakeError:
            raise
        except OSError as error:
            raise RendezvousLostError(f"cannot reach the rendezvous at {address[0]}:{address[1]}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def close(self, failure: str = "") -> None:
        """Leave the run and close the connection. An empty `failure` means that this learner has finished its part."""
        self.closed, self.failed = True, bool(failure)
        self._connection.close({"kind": "leave", "failure": failure})

    @property
    def connected(self) -> bool:
        """Whether the rendezvous can be reached at the moment."""
        return self._connection.connected

    def ask_for_info(self) -> Message:
        """What the rendezvous knows about the run. Raises RendezvousLostError as soon as the connection is lost."""
        info: Message = self._connection.ask("info")["info"]
        return info

    def served_files(self) -> dict[int, Address]:
        """For every learner that has come, also a lost one: where its supervisor serves the files of its directory.

        Raises RendezvousLostError as soon as the connection is lost.
        """
        served = self.ask_for_info().get("files", {})
        return {int(learner): (str(host), int(port)) for learner, (host, port) in served.items()}

    def report_death(self, process: str, reason: str, run: str = "") -> None:
        """Say that a process of the run `run` has ended; it may not have registered."""
        self._connection.send({"kind": "process_died", "run": run, "process": process, "reason": reason})

    def _ask(self, kind: str, patience_s: float = PATIENCE_S, *, repeat: bool = False, **fields: Any) -> Message:  # noqa: ANN401
        reply = self._connection.ask(kind, patience_s, repeat=repeat, **fields)
        if "dropped" in reply:
            raise DroppedError(reply["dropped"])
        if "refused" in reply:
            raise LaunchError(reply["refused"])
        return reply

    def _opened(self) -> AwaitedReplies:
        """The connection, which connects again by itself."""
        return ReconnectingConnection(self._connect, self._received, self._reconnected)

    def _connect(self) -> MessageConnection:
        hello = Hello(-1 if self.id is None else self.id, Purpose.RENDEZVOUS, os.getpid(), bytes(16))
        connection, _ = handshake.connect(self._address, hello, RENDEZVOUS, self._security)
        return MessageConnection(connection)

    def _received(self, message: Message) -> None:
        """Called with every message that is no reply, in the connection's thread."""

    def _reconnected(self) -> None:
        """Called after every reconnection, in the connection's thread."""
