"""What LocalSGD learners tell each other about a round: a header, alone or before a message."""

from __future__ import annotations

import struct
import threading
from concurrent.futures import Future
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from roundelay.clock import then
from roundelay.strategies.message_exchange import exchange_messages
from roundelay.transport.base import Transport
from roundelay.transport.messages import ask

_HEADER = struct.Struct("<qqq")
HEADER_BYTES = _HEADER.size


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


class RoundMessages:
    """Sends headers and messages to peers. Any thread may call it. A future fails as the transport's do."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._buffers: dict[
            int, list[Tensor]
        ] = {}  # free ones by length; peers keep them mapped, so they are used again

    def tell(self, peer: int, header: Header) -> Future[Reply]:
        """Send a header; the peer answers with a header."""
        buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        header.write(buffer)
        return then(ask(self._transport, peer, buffer), lambda reply: Reply(Header.read(reply), reply[HEADER_BYTES:]))

    def exchange(self, peer: int, round: int, message: Tensor) -> Future[Reply]:
        """Send the message of a round; the peer answers with its own of equal length, or says that it is absent."""
        buffer = self._buffer(HEADER_BYTES + len(message))
        Header(Kind.MESSAGE, round, round).write(buffer)
        buffer[HEADER_BYTES:] = message
        call = exchange_messages(self._transport, peer, buffer, HEADER_BYTES)
        call.add_done_callback(lambda ended: self._give_up(buffer) if ended.exception() else None)
        return then(call, self._taken_from)

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
