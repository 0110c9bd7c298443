"""Messages between two learners: sealed headers, whole buffers."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from torch import Tensor

from roundelay.errors import HandshakeError

MESSAGE_LIMIT_BYTES = 2**40

_HEADER = struct.Struct("!BxxxiQQQ")
_COUNT = struct.Struct("!Q")
_SEAL_BYTES = 16
Name = TypeVar("Name", bound=IntEnum)


class Kind(IntEnum):
    """What a message on a lane is."""

    CALL = 1
    REPLY = 2
    REFUSED = 3
    SWAP = 4
    TAKEN = 5
    STATE = 6


@dataclass(frozen=True)
class Header:
    """Precedes every payload. With `shared_fd` >= 0 there is none: it lies at `offset` of the sender's shared memory."""

    kind: Kind
    nbytes: int
    round: int = 0
    shared_fd: int = -1
    offset: int = 0

    def pack(self) -> bytes:
        """As it travels, but for its seal."""
        return _HEADER.pack(self.kind, self.shared_fd, self.round, self.nbytes, self.offset)

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        """The inverse. Raises HandshakeError for what no learner sends."""
        kind, shared_fd, round, nbytes, offset = _HEADER.unpack(packed)
        if max(nbytes, offset) > MESSAGE_LIMIT_BYTES:
            raise HandshakeError(f"the other end announced {nbytes} bytes at offset {offset}, more than any model has")
        return cls(known(Kind, kind), nbytes, round, shared_fd, offset)


class _Seal:
    """Proofs that a message is the next one of who has the key."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def of(self, message: bytes) -> bytes:
        self._count += 1
        return hashlib.blake2b(_COUNT.pack(self._count) + message, key=self._key, digest_size=_SEAL_BYTES).digest()


class Channel:
    """A connection after the handshake, of one thread at a time.

    Every header is sealed with a key that only the two ends have, and only for this connection and direction, and with its
    number: what is forged, replayed or out of order is refused.

    Args:
        connection: to the other end.
        sending: the key of our own messages.
        receiving: the key of theirs.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self.connection = connection
        self._outgoing, self._incoming = _Seal(sending), _Seal(receiving)

    def send(self, header: Header, payload: Tensor | None = None) -> int:
        """Send a message; the number of bytes."""
        packed = header.pack()
        sealed = packed + self._outgoing.of(packed)
        if payload is None:
            self.connection.sendall(sealed)
            return len(sealed)
        self.connection.sendall(sealed, socket.MSG_MORE)
        self.connection.sendall(_bytes(payload))
        return len(sealed) + payload.nbytes

    def receive(self) -> Header:
        """The next header. Raises ConnectionError at the end of the stream, HandshakeError for what no learner sends."""
        message = receive_exactly(self.connection, _HEADER.size + _SEAL_BYTES)
        packed, seal = message[: _HEADER.size], message[_HEADER.size :]
        if not hmac.compare_digest(seal, self._incoming.of(packed)):
            raise HandshakeError("a header came that the other end has not sealed, or not as its next one")
        return Header.unpack(packed)

    def receive_into(self, buffer: Tensor) -> None:
        """Fill `buffer`, in as few calls as the kernel allows."""
        view = _bytes(buffer)
        while view:
            count = self.connection.recv_into(view, 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionError("the connection was closed in the middle of a message")
            view = view[count:]


def known(names: type[Name], number: int) -> Name:
    """Garbage ends the connection it came on, and nothing else."""
    try:
        return names(number)
    except ValueError:
        raise HandshakeError(f"the other end sent {names.__name__.lower()} {number}, which no learner sends") from None


def receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes. Raises ConnectionError at the end of the stream."""
    data = b""
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return data


def _bytes(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]  # NumPy says so from Python 3.12 on
