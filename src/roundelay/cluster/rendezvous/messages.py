"""Small messages between learners and their rendezvous: JSON with a length before it, on a socket that never blocks."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
from typing import Any

from roundelay.errors import HandshakeError

Message = dict[str, Any]

LIMIT_BYTES = 2**26  # what a learner has used in a long run, told to a restarted rendezvous, has room
_LENGTH = struct.Struct("!I")
_NOTHING_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def packed(message: Message) -> bytes:
    """As it travels."""
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


class MessageBuffer:
    """Bytes in, whole messages out.

    >>> inbox = MessageBuffer()
    >>> inbox.feed(packed({"kind": "beat"})[:5]), inbox.feed(packed({"kind": "beat"})[5:])
    ([], [{'kind': 'beat'}])
    """

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now. Raises HandshakeError for what no learner sends."""
        self._pending += data
        messages = []
        while len(self._pending) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._pending)
            if size > LIMIT_BYTES:
                raise HandshakeError(f"the other end announced a message of {size} bytes, more than any learner sends")
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
        raise HandshakeError("the other end sent what is no message")
    return message


class MessageLine:
    """A connection for messages, to be used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._inbox = MessageBuffer()
        self._unsent = bytearray()

    def send(self, message: Message) -> None:
        """At once, or as soon as there is room. Raises OSError if the connection is gone."""
        self._unsent += packed(message)
        self.flush()

    def flush(self) -> None:
        """Send what had no room before."""
        while self._unsent:
            try:
                sent = self.connection.send(self._unsent)
            except _NOTHING_NOW:
                return
            del self._unsent[:sent]

    def receive(self) -> list[Message]:
        """What has come. Raises OSError at the end of the connection, HandshakeError for what no learner sends."""
        messages: list[Message] = []
        while True:
            try:
                data = self.connection.recv(2**16)
            except _NOTHING_NOW:
                return messages
            if not data and not messages:
                raise ConnectionError("the connection was closed")
            if not data:
                return messages
            messages += self._inbox.feed(data)

    def hang_up(self) -> None:
        """End the connection; whoever reads it finds out."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket."""
        self.connection.close()
