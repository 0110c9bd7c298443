"""Messages on a connection between two learners: authenticated headers, and payloads with a checksum."""

from __future__ import annotations

import hashlib
import hmac
import socket as sockets
import ssl
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from roundelay.errors import HandshakeError, PeerLostError, RefusedError
from roundelay.transport.base import NO_CALLS
from roundelay.transport.checksum import CHECKSUM_BYTES, PIECE_BYTES, Checksum, checksum
from roundelay.transport.shared_memory import PeerMemory

if TYPE_CHECKING:
    from roundelay.transport.handshake import Hello

MESSAGE_LIMIT_BYTES = 2**40
CHECKSUM = "checksum"

# With its tag a header has 64 bytes, so that the payload behind it starts at a cache line, which the kernel copies faster.
_HEADER = struct.Struct(f"!BxxxiIiQQ8x{CHECKSUM_BYTES}s")
_COUNT = struct.Struct("!Q")
_TAG_BYTES = 16
_TEXT_LIMIT_BYTES = 200
Name = TypeVar("Name", bound=IntEnum)


class Kind(IntEnum):
    """What a message is."""

    CALL = 1
    REPLY = 2
    REFUSED = 3  # the last message; the payload says why
    SWAP = 4
    RECEIVED = 5  # the swap: its buffer may change again
    STATE = 6
    NO_CALLS = 7  # this learner serves no more calls


class Header(NamedTuple):
    """Precedes every payload. The run and the two learners are not repeated: the key of the tag belongs to them alone.

    Attributes:
        kind: of the message.
        nbytes: of the payload.
        round: of a swap.
        shared_fd: if >= 0, no payload follows: it is in this shared memory of the sender, where the reply goes, too.
        request_fd: if >= 0, the request of a call is in this memory instead, and `shared_fd` only takes the reply.
        layout: code of the layout of the weights; 0: not checked.
        checksum: of the payload, if one follows.
    """

    kind: Kind
    nbytes: int
    round: int = 0
    shared_fd: int = -1
    request_fd: int = -1
    layout: int = 0
    checksum: bytes = bytes(CHECKSUM_BYTES)

    def pack(self) -> bytes:
        """As it travels, without its tag."""
        memory = self.shared_fd, self.layout, self.request_fd
        return _HEADER.pack(self.kind, *memory, self.round, self.nbytes, self.checksum)

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        """The inverse of `pack`. Raises HandshakeError for values that no learner sends."""
        kind, shared_fd, layout, request_fd, round, nbytes, expected = _HEADER.unpack(packed)
        if nbytes > MESSAGE_LIMIT_BYTES:
            raise HandshakeError(f"the other end announced {nbytes} bytes, more than any model has")
        return cls(known(Kind, kind), nbytes, round, shared_fd, request_fd, layout, expected)


class _Authenticator:
    """Tags that prove a header to be the next one from the holder of the key."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def next_tag(self, message: bytes) -> bytes:
        self._count += 1
        return hashlib.blake2b(_COUNT.pack(self._count) + message, key=self._key, digest_size=_TAG_BYTES).digest()


class Connection:
    """A connection after the handshake. One thread at a time uses it.

    Every header has a tag made with a key that only the two ends have, for this connection and direction only, and with
    a running number: a header that is forged, replayed or out of order is refused.

    Args:
        socket: to the other end.
        peer: the other end, and the keys.

    Attributes:
        memory: shared memory of the peer, as far as it was mapped for messages of this connection.
    """

    def __init__(self, socket: sockets.socket, peer: Hello) -> None:
        self.socket, self.peer = socket, peer
        self.memory = PeerMemory(peer.pid)
        sending, receiving = peer.keys
        self._outgoing, self._incoming = _Authenticator(sending), _Authenticator(receiving)
        encrypted = isinstance(socket, ssl.SSLSocket)  # which takes no flags
        self._more, self._all = (0, 0) if encrypted else (sockets.MSG_MORE, sockets.MSG_WAITALL)

    def send(self, header: Header, payload: Tensor | None = None) -> int:
        """Send a message and return its length. The payload must not change meanwhile."""
        if payload is not None:
            header = header._replace(checksum=checksum(payload))
        packed = header.pack()
        message = packed + self._outgoing.next_tag(packed)
        if payload is None:
            self.socket.sendall(message)
            return len(message)
        self.socket.sendall(message, self._more)
        for piece in payload.split(PIECE_BYTES):
            self.socket.sendall(_bytes(piece))
        return len(message) + payload.nbytes

    def refuse(self, reason: str) -> None:
        """Tell the other end that its last message was not accepted."""
        text = torch.frombuffer(bytearray(reason.encode()[:_TEXT_LIMIT_BYTES] or b"?"), dtype=torch.uint8)
        self.send(Header(Kind.REFUSED, text.nbytes), text)

    def receive(self) -> Header:
        """The next header. Raises ConnectionError at the end of the stream, HandshakeError for a wrong tag."""
        message = receive_exactly(self.socket, _HEADER.size + _TAG_BYTES)
        packed, tag = message[: _HEADER.size], message[_HEADER.size :]
        if not hmac.compare_digest(tag, self._incoming.next_tag(packed)):
            raise HandshakeError("a header has a wrong tag: it was forged, altered, repeated or sent out of order")
        return Header.unpack(packed)

    def receive_into(self, buffer: Tensor, header: Header) -> None:
        """Fill `buffer` with the payload that `header` has announced.

        Raises RefusedError if the checksum differs; the next message can still be received.
        """
        if buffer.nbytes != header.nbytes:
            raise HandshakeError(f"the other end sends {header.nbytes} bytes, but {buffer.nbytes} are expected")
        sums = Checksum()
        for piece in buffer.split(PIECE_BYTES):  # summed while it is in the cache
            self._fill(_bytes(piece))
            sums.add(piece)
        if sums.digest() != header.checksum:
            raise RefusedError(self.peer.rank, CHECKSUM)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self.socket.recv_into(view, len(view), self._all)
            if count == 0:
                raise ConnectionError("the connection was closed in the middle of a message")
            view = view[count:]

    def receive_answer(self, expected: Kind) -> Header:
        """The header of the answer to our last message.

        Raises RefusedError if that message was not accepted, PeerLostError if the peer serves no more calls.
        """
        header = self.receive()
        if header.kind == Kind.REFUSED and header.nbytes <= _TEXT_LIMIT_BYTES:
            text = torch.empty(header.nbytes, dtype=torch.uint8)
            self.receive_into(text, header)
            raise RefusedError(self.peer.rank, bytes(text.tolist()).decode(errors="replace"))
        if header.kind == Kind.NO_CALLS:
            raise PeerLostError(self.peer.rank, NO_CALLS)
        if header.kind != expected:
            raise HandshakeError(f"the other end answered {header.kind.name}, but {expected.name} was expected")
        return header


def known(names: type[Name], number: int) -> Name:
    """The enum member with that number. Raises HandshakeError, which ends the connection, if there is none."""
    try:
        return names(number)
    except ValueError:
        raise HandshakeError(f"the other end sent {names.__name__.lower()} {number}, which no learner sends") from None


def receive_exactly(socket: sockets.socket, nbytes: int) -> bytes:
    """That many bytes. Raises ConnectionError at the end of the stream."""
    data = b""
    while len(data) < nbytes:
        piece = socket.recv(nbytes - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return data


def _bytes(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]  # NumPy says so from Python 3.12 on
