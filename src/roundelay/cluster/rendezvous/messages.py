"""Messages between learners and the rendezvous: JSON objects with a length prefix, over a non-blocking socket."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
from typing import Any

from roundelay.errors import HandshakeError

Message = dict[str, Any]

# Room for the largest message: a learner that tells a restarted rendezvous every number it has used in a long run.
LIMIT_BYTES = 2**26
_LENGTH = struct.Struct("!I")
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def packed(message: Message) -> bytes:
    """The message as bytes for the socket, with its length first."""
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


class MessageBuffer:
    """Collects received bytes and returns complete messages.

    >>> buffer = MessageBuffer()
    >>> buffer.feed(packed({"kind": "heartbeat"})[:5]), buffer.feed(packed({"kind": "heartbeat"})[5:])
    ([], [{'kind': 'heartbeat'}])
    """

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes; return the messages that are complete now. Raises HandshakeError for bytes that are no message."""
        self._pending += data
        messages = []
        while len(self._pending) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._pending)
            if size > LIMIT_BYTES:
                raise HandshakeError(f"the other end announced a message of {size} bytes; the limit is {LIMIT_BYTES}")
            if len(self._pending) < _LENGTH.size + size:
                break
            messages.append(_parsed(bytes(self._pending[_LENGTH.size : _LENGTH.size + size])))
            del self._pending[: _LENGTH.size + size]
        return messages


def _parsed(data: bytes) -> Message:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise HandshakeError("the other end sent bytes that are no message: not a JSON object with a 'kind'")
    return message


class MessageConnection:
    """Sends and receives messages without blocking. Only one thread may use it, except for `shut_down`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._received = MessageBuffer()
        self._unsent = bytearray()

    def send(self, message: Message) -> None:
        """Send now what the socket takes, and the rest with the next `flush`. Raises OSError if the connection is gone."""
        self._unsent += packed(message)
        self.flush()

    def flush(self) -> None:
        """Send the bytes that the socket did not take before."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except _WOULD_BLOCK:
                return
            del self._unsent[:sent]

    def receive(self) -> list[Message]:
        """Return all messages received so far.

        Raises OSError once the connection has ended, HandshakeError for bytes that are no message.
        """
        messages: list[Message] = []
        while True:
            try:
                data = self.socket.recv(2**16)
            except _WOULD_BLOCK:
                return messages
            if not data and not messages:
                raise ConnectionError("the connection was closed")
            if not data:
                return messages
            messages += self._received.feed(data)

    def shut_down(self) -> None:
        """End the connection: both ends then read the end of the stream."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket."""
        self.socket.close()
