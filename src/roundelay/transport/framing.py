"""Messages between two learners: sealed headers, and payloads with a checksum."""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from roundelay.errors import HandshakeError, PeerLostError, RefusedError
from roundelay.transport.checksum import CHECKSUM_BYTES, PIECE_BYTES, Checksum, SharedChecksum, checksum
from roundelay.transport.shared_memory import PeerMemory

if TYPE_CHECKING:
    from roundelay.transport.handshake import Hello

MESSAGE_LIMIT_BYTES = 2**40
SYSCALL_BYTES = (
    2**18
)  # at a time: a kernel that does not preempt itself keeps whoever computes waiting for the whole of a call
CHECKSUM = "checksum"

# With its seal a header has 64 bytes: the kernel copies a payload behind it that is aligned to cache lines in half the time.
_HEADER = struct.Struct(f"!BxxxiIiQQ8x{CHECKSUM_BYTES}s")
_COUNT = struct.Struct("!Q")
_SEAL_BYTES = 16
_TEXT_LIMIT_BYTES = 200
Name = TypeVar("Name", bound=IntEnum)


class Kind(IntEnum):
    """What a message on a lane is."""

    CALL = 1
    REPLY = 2
    REFUSED = 3  # this one; the payload says why
    SWAP = 4
    TAKEN = 5
    STATE = 6
    RETIRED = 7  # no more calls are served


class Header(NamedTuple):
    """Precedes every payload. With `shared_fd` >= 0 there is none: it lies in that shared memory of the sender's.

    With `source_fd` >= 0, too, a request lies in that other memory, and the first is for the reply only.

    The run and the two learners are not repeated in every header: the key that seals it belongs to them alone.
    """

    kind: Kind
    nbytes: int
    round: int = 0
    shared_fd: int = -1
    source_fd: int = -1
    layout: int = 0  # of the weights: sizes and dtypes; 0 where it means nothing
    checksum: bytes = bytes(CHECKSUM_BYTES)

    def pack(self) -> bytes:
        """As it travels, but for its seal."""
        places = self.shared_fd, self.layout, self.source_fd
        return _HEADER.pack(self.kind, *places, self.round, self.nbytes, self.checksum)

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        """The inverse. Raises HandshakeError for what no learner sends."""
        kind, shared_fd, layout, source_fd, round, nbytes, expected = _HEADER.unpack(packed)
        if nbytes > MESSAGE_LIMIT_BYTES:
            raise HandshakeError(f"the other end announced {nbytes} bytes, more than any model has")
        return cls(known(Kind, kind), nbytes, round, shared_fd, source_fd, layout, expected)


class _Seal:
    """Proofs that a message is the next one of who has the key."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def of(self, message: bytes) -> bytes:
        self._count += 1
        return hashlib.blake2b(_COUNT.pack(self._count) + message, key=self._key, digest_size=_SEAL_BYTES).digest()


class Connection:
    """A connection after the handshake, of one thread at a time.

    Every header is sealed with a key that only the two ends have, and only for this connection and direction, and with its
    number: what is forged, replayed or out of order is refused. It has the checksum of the payload, if one follows.

    Args:
        connection: to the other end.
        peer: who that is, and the keys.

    Attributes:
        memory: of the other end, as far as it was mapped for messages of this connection.
    """

    def __init__(self, connection: socket.socket, peer: Hello) -> None:
        self.connection, self.peer = connection, peer
        self.memory = PeerMemory(peer.pid)
        sending, receiving = peer.keys
        self._outgoing, self._incoming = _Seal(sending), _Seal(receiving)
        encrypted = isinstance(connection, ssl.SSLSocket)  # which knows no flags
        self._more, self._all = (0, 0) if encrypted else (socket.MSG_MORE, socket.MSG_WAITALL)

    def send(self, header: Header, payload: Tensor | None = None, sums: SharedChecksum | None = None) -> int:
        """Send a message; the number of bytes. The payload, whose checksum may be known, must not change meanwhile."""
        if payload is not None:
            header = header._replace(checksum=sums.digest() if sums else checksum(payload))
        packed = header.pack()
        sealed = packed + self._outgoing.of(packed)
        if payload is None:
            self.connection.sendall(sealed)
            return len(sealed)
        self.connection.sendall(sealed, self._more)
        view = _bytes(payload)
        for start in range(0, len(view), SYSCALL_BYTES):
            self.connection.sendall(view[start : start + SYSCALL_BYTES])
        return len(sealed) + payload.nbytes

    def refuse(self, reason: str) -> None:
        """Tell the other end that its last message was not accepted."""
        text = torch.frombuffer(bytearray(reason.encode()[:_TEXT_LIMIT_BYTES] or b"?"), dtype=torch.uint8)
        self.send(Header(Kind.REFUSED, text.nbytes), text)

    def receive(self) -> Header:
        """The next header. Raises ConnectionError at the end of the stream, HandshakeError for what no learner sends."""
        message = receive_exactly(self.connection, _HEADER.size + _SEAL_BYTES)
        packed, seal = message[: _HEADER.size], message[_HEADER.size :]
        if not hmac.compare_digest(seal, self._incoming.of(packed)):
            raise HandshakeError("a header came that the other end has not sealed, or not as its next one")
        return Header.unpack(packed)

    def receive_into(self, buffer: Tensor, header: Header) -> None:
        """Fill `buffer` with the payload that `header` has announced, summing pieces while the next ones are on their way.

        Raises RefusedError if it is not what was sent; whatever comes next can still be received.
        """
        if buffer.nbytes != header.nbytes:
            raise HandshakeError(f"the other end sends {header.nbytes} bytes where {buffer.nbytes} are expected")
        sums = Checksum()
        for piece in buffer.split(PIECE_BYTES):
            self._fill(_bytes(piece))
            sums.add(piece)
        if sums.digest() != header.checksum:
            raise RefusedError(self.peer.rank, CHECKSUM)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self.connection.recv_into(view, min(len(view), SYSCALL_BYTES), self._all)
            if count == 0:
                raise ConnectionError("the connection was closed in the middle of a message")
            view = view[count:]

    def receive_answer(self, expected: Kind) -> Header:
        """The header of the answer to our last message.

        Raises RefusedError if it was not accepted, PeerLostError if no more are.
        """
        header = self.receive()
        if header.kind == Kind.REFUSED and header.nbytes <= _TEXT_LIMIT_BYTES:
            text = torch.empty(header.nbytes, dtype=torch.uint8)
            self.receive_into(text, header)
            raise RefusedError(self.peer.rank, bytes(text.tolist()).decode(errors="replace"))
        if header.kind == Kind.RETIRED:
            raise PeerLostError(self.peer.rank, "it serves no more calls")
        if header.kind != expected:
            raise HandshakeError(f"the other end answered {header.kind.name} where only {expected.name} makes sense")
        return header


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
