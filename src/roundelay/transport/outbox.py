"""Messages that are sent while a connection waits for data, so that both directions of a link are busy."""

from __future__ import annotations

import contextlib
import select
import socket as sockets
import ssl
from collections.abc import Iterator


class Outbox:
    """What remains to be sent on a connection whose only thread is about to receive.

    One thread does both: two threads may not use an encrypted connection at the same time. The socket must not block.

    Args:
        socket: of the connection.
        parts: bytes to send. A part is asked for when the one before it was sent, and must not change until then.
    """

    def __init__(self, socket: sockets.socket, parts: Iterator[memoryview]) -> None:
        self._socket, self._parts = socket, parts
        self._unsent: memoryview | None = memoryview(b"")
        self._poll = select.poll()

    def send_until_readable(self) -> None:
        """Send until there is something to receive. Blocks if there is nothing to do."""
        while True:
            while self._unsent is not None and not self._unsent:
                self._unsent = next(self._parts, None)
            self._poll.register(self._socket, select.POLLIN | (0 if self._unsent is None else select.POLLOUT))
            ((_, ready),) = self._poll.poll()
            if self._unsent is None or ready & ~select.POLLOUT:
                return
            with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
