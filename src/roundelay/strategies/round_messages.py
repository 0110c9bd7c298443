"""What LocalSGD learners tell each other about a round: a header, alone or before a message, and how both travel."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from roundelay.clock import then
from roundelay.transport.base import Begin, Call, Transport

_HEADER = struct.Struct("<qqq")
HEADER_BYTES = _HEADER.size
PIECE_BYTES = 2**20


class Kind(IntEnum):
    """What the sender says."""

    BEGUN = 1  # the sender has begun the round
    NOT_YET = 2  # the sender has not begun the round
    ABSENT = 3  # the sender takes no part in the round with the receiver
    MESSAGE = 4  # the sender's message of the round follows


class Header(NamedTuple):
    """What a learner says about a round, and the round that it is in itself."""

    kind: int
    round: int
    own_round: int

    @classmethod
    def read(cls, buffer: Tensor) -> Header:
        """Read from the first `HEADER_BYTES` of a buffer."""
        return cls(*_HEADER.unpack(bytes(buffer[:HEADER_BYTES].tolist())))

    def write(self, buffer: Tensor) -> None:
        """Write to the first `HEADER_BYTES` of a buffer."""
        buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(_HEADER.pack(*self)), dtype=torch.uint8)


class Reply(NamedTuple):
    """A peer's answer. The message is empty unless the header says that one follows."""

    header: Header
    message: Tensor


class _End:
    """One end of an exchange: a header, and the pieces of a message if there is one. Both directions are busy meanwhile.

    Attributes:
        pieces: of the buffer; the first one is the header.
        nbytes: length of the buffer.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.pieces, self.nbytes = [buffer[:HEADER_BYTES], *_pieces(buffer[HEADER_BYTES:])], len(buffer)

    def prepare(self, k: int) -> None:
        """The message is in the buffer already."""

    def apply(self, k: int) -> None:
        """The reply has replaced the message in the buffer."""


class AnsweringEnd(_End):
    """The end that is asked.

    Args:
        request: a header, and the peer's message if there is one.
        reply: takes a header and our message; it may be the same memory.
        offered: called when the header has come. It writes the header of the reply, and returns our message, as long as the
            peer's; None: there is no message, so the pieces that follow are ignored.
        taken: called at the end with the peer's message, or with None if the exchange has failed at both ends.
    """

    def __init__(
        self,
        request: Tensor,
        reply: Tensor,
        offered: Callable[[], Tensor | None],
        taken: Callable[[Tensor | None], None],
    ) -> None:
        super().__init__(reply)
        self._request = _pieces(request[HEADER_BYTES:])
        self._offered, self._taken = offered, taken
        self._message: tuple[Tensor, ...] | None = None
        self._received = torch.empty(0, dtype=torch.uint8)

    def apply(self, k: int) -> None:
        """Take piece k of the request, and put our own in its place."""
        if k == 0:
            message = self._offered()
            if message is not None:
                self._message, self._received = _pieces(message), torch.empty_like(message)
        elif self._message is not None:
            _pieces(self._received)[k - 1].copy_(self._request[k - 1])
            self.pieces[k].copy_(self._message[k - 1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._message is not None:
            self._taken(self._received if kind is None else None)


def _pieces(message: Tensor) -> tuple[Tensor, ...]:
    return message.split(PIECE_BYTES) if len(message) else ()


class RoundMessages:
    """Sends headers and messages to peers. Any thread may call it. A future fails as the transport's do."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        # Free ones by length. Peers keep them mapped, so they are used again.
        self._buffers: dict[int, list[Tensor]] = {}

    def tell(self, peer: int, header: Header) -> Future[Reply]:
        """Send a header; the peer answers with a header."""
        buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        header.write(buffer)
        return then(self._call(peer, buffer), lambda reply: Reply(Header.read(reply), reply[HEADER_BYTES:]))

    def exchange(self, peer: int, round: int, message: Tensor) -> Future[Reply]:
        """Send the message of a round; the peer answers with its own of equal length, or says that it is absent."""
        buffer = self._buffer(HEADER_BYTES + len(message))
        Header(Kind.MESSAGE, round, round).write(buffer)
        buffer[HEADER_BYTES:] = message
        call = self._call(peer, buffer)
        call.add_done_callback(lambda ended: self._give_up(buffer) if ended.exception() else None)
        return then(call, self._taken_from)

    def _call(self, peer: int, buffer: Tensor) -> Future[Tensor]:
        """Send what is in the buffer. The peer's header and message replace it, and are the result of the future."""
        begin: Begin = lambda peer, request, reply: contextlib.nullcontext(_End(reply))  # noqa: E731
        call = Call(buffer, buffer, begin, streams=len(buffer) > HEADER_BYTES)
        return then(self._transport.call(peer, call), lambda _: buffer)

    def _buffer(self, nbytes: int) -> Tensor:
        with self._lock:
            free = self._buffers.setdefault(nbytes, [])
            return free.pop() if free else self._transport.allocate(nbytes)

    def _give_up(self, buffer: Tensor) -> None:
        self._transport.free(buffer)  # a peer that is only frozen may still write to it

    def _taken_from(self, buffer: Tensor) -> Reply:
        reply = Reply(Header.read(buffer), buffer[HEADER_BYTES:].clone())
        with self._lock:
            self._buffers[len(buffer)].append(buffer)
        return reply
