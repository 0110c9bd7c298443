"""Messages on a connection between two learners: authenticated headers, and payloads with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket as sockets
import ssl
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from roundelay.errors import HandshakeError, PeerLostError, RefusedError
from roundelay.transport.base import NO_CALLS
from roundelay.transport.checksum import CHECKSUM_BYTES, PIECE_BYTES, Checksum, checksum
from roundelay.transport.outbox import Outbox
from roundelay.transport.shared_memory import PeerMemory

if TYPE_CHECKING:
    from roundelay.transport.handshake import Hello

MESSAGE_LIMIT_BYTES = 2**40
CHECKSUM = "checksum"

# With its tag a header has 64 bytes, so that the payload behind it starts at a cache line, which the kernel copies faster.
_HEADER = struct.Struct(f"!BxxxqIqQQ{CHECKSUM_BYTES}s")
_COUNT = struct.Struct("!Q")
_TAG_BYTES = 16
HEADER_BYTES = _HEADER.size + _TAG_BYTES
_TEXT_LIMIT_BYTES = 200
Name = TypeVar("Name", bound=IntEnum)


class Kind(IntEnum):
    """What a message is."""

    CALL = 1  # begins an exchange
    REPLY = 2  # to a piece
    REFUSED = 3  # the last message; the payload says why
    SWAP = 4
    RECEIVED = 5  # answers a swap: the sender's buffer may change again
    STATE = 6
    PIECE = 7  # of the request of an exchange
    CONFIRM = 8  # the caller has applied all replies, so the exchange is over


class Header(NamedTuple):
    """Precedes every payload. It names neither the run nor the learners, because the key of its tag is theirs alone.

    Attributes:
        kind: of the message.
        nbytes: of the payload.
        round: of a swap.
        shared: if >= 0, payloads do not follow but are in this shared memory of the sender; replies go there, too.
        request: if >= 0, the request of a call is in this memory instead, and `shared` only takes the reply.
        layout: code of the layout of the weights; 0: not checked.
        checksum: of the payload, if one follows.
    """

    kind: Kind
    nbytes: int
    round: int = 0
    shared: int = -1
    request: int = -1
    layout: int = 0
    checksum: bytes = bytes(CHECKSUM_BYTES)

    def pack(self) -> bytes:
        """As it travels, without its tag."""
        memory = self.shared, self.layout, self.request
        return _HEADER.pack(self.kind, *memory, self.round, self.nbytes, self.checksum)

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        """The inverse of `pack`. Raises HandshakeError for values that no learner sends."""
        kind, shared, layout, request, round, nbytes, expected = _HEADER.unpack(packed)
        if nbytes > MESSAGE_LIMIT_BYTES:
            raise HandshakeError(f"the other end announced {nbytes} bytes, more than any model has")
        return cls(known(Kind, kind), nbytes, round, shared, request, layout, expected)

    def is_other_layout(self, layout: int) -> bool:
        """Whether these are certainly weights of another model."""
        return bool(self.layout and layout and self.layout != layout)


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
        share_memory: whether the peer may have us read and write its memory.

    Attributes:
        memory: shared memory of the peer, as far as it was mapped for messages of this connection.
    """

    def __init__(self, socket: sockets.socket, peer: Hello, *, share_memory: bool = False) -> None:
        self.socket, self.peer = socket, peer
        self.memory = PeerMemory(peer.pid if share_memory else None)
        sending, receiving = peer.keys
        self._outgoing, self._incoming = _Authenticator(sending), _Authenticator(receiving)
        self._outbox: Outbox | None = None
        encrypted = isinstance(socket, ssl.SSLSocket)  # which takes no flags
        self._more, self._all = (0, 0) if encrypted else (sockets.MSG_MORE, sockets.MSG_WAITALL)

    def send(self, header: Header, payload: Tensor | None = None) -> int:
        """Send a message and return its length. The payload must not change meanwhile."""
        message = self._sealed(header, payload)
        self.socket.sendall(message, 0 if payload is None else self._more)
        if payload is None:
            return len(message)
        for piece in payload.split(PIECE_BYTES):
            self.socket.sendall(_bytes(piece))
        return len(message) + payload.nbytes

    def _sealed(self, header: Header, payload: Tensor | None) -> bytes:
        if payload is not None:
            header = header._replace(checksum=checksum(payload))
        packed = header.pack()
        return packed + self._outgoing.next_tag(packed)

    @contextlib.contextmanager
    def sending(self, messages: Iterable[tuple[Header, Tensor | None]]) -> Iterator[None]:
        """In this block, send these messages while we wait for data to receive.

        At the end of the block a message may still be unsent, whatever was received. Then close the connection.
        """

        def parts() -> Iterator[memoryview]:
            for header, payload in messages:
                yield memoryview(self._sealed(header, payload))
                if payload is not None:
                    yield _bytes(payload)

        self._outbox = Outbox(self.socket, parts())
        self.socket.setblocking(False)
        try:
            yield
        finally:
            self._outbox = None
            self.socket.setblocking(True)

    def refuse(self, reason: str) -> None:
        """Tell the other end that its last message was not accepted."""
        text = torch.frombuffer(bytearray(reason.encode()[:_TEXT_LIMIT_BYTES] or b"?"), dtype=torch.uint8)
        self.send(Header(Kind.REFUSED, text.nbytes), text)

    def receive(self) -> Header:
        """The next header. Raises ConnectionError at the end of the stream, HandshakeError for a wrong tag."""
        message = bytearray(HEADER_BYTES)
        self._fill(memoryview(message))
        packed, tag = bytes(message[: _HEADER.size]), bytes(message[_HEADER.size :])
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
            try:
                count = self.socket.recv_into(view, len(view), self._all)
            except (BlockingIOError, ssl.SSLWantReadError):
                assert self._outbox is not None
                self._outbox.send_until_readable()
                continue
            if count == 0:
                raise ConnectionError("the connection was closed")
            view = view[count:]

    def drain(self) -> None:
        """After our last message: read until the other end closes. If we closed first, that message could get lost."""
        self.socket.shutdown(sockets.SHUT_WR)
        rest = bytearray(PIECE_BYTES)
        while self.socket.recv_into(rest):
            pass

    def receive_kind(self, expected: Kind) -> Header:
        """The next header, which must be of that kind.

        Raises RefusedError if our last message was not accepted, PeerLostError if the peer serves no more calls.
        """
        header = self.receive()
        if header.kind == Kind.REFUSED and header.nbytes <= _TEXT_LIMIT_BYTES:
            text = torch.empty(header.nbytes, dtype=torch.uint8)
            self.receive_into(text, header)
            reason = bytes(text.tolist()).decode(errors="replace")
            raise PeerLostError(self.peer.rank, reason) if reason == NO_CALLS else RefusedError(self.peer.rank, reason)
        if header.kind != expected:
            raise HandshakeError(f"the other end sent {header.kind.name}, but {expected.name} was expected")
        return header


def known(names: type[Name], number: int) -> Name:
    """The enum member with that number. Raises HandshakeError, which ends the connection, if there is none."""
    try:
        return names(number)
    except ValueError:
        raise HandshakeError(f"the other end sent {names.__name__.lower()} {number}, which no learner sends") from None


def _bytes(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]  # NumPy says so from Python 3.12 on
