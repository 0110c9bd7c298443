"""Serves the calls of peers: exchanges that they ask for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from roundelay.errors import RefusedError
from roundelay.transport.base import NO_CALLS, Begin, Exchange, Transport
from roundelay.transport.framing import Connection, Header, Kind
from roundelay.transport.reporting import failing_training

STALL_S = 1.0  # a waiting call replaces the request buffer after this time without a piece


class _RequestBuffer:
    """Where requests that come over TCP are received: one at a time, so one buffer is enough."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of_size(self, nbytes: int) -> Tensor:
        if self._memory.nbytes < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes]


class CallServer:
    """Answers calls, each in the thread of its connection.

    Args:
        owner: its traffic and refusals are counted, and its layout is checked.
    """

    def __init__(self, owner: Transport) -> None:
        self._owner = owner
        self._begin: Begin | None = None
        self._ready = threading.Event()  # set once calls are answered or refused
        self._calls_changed = threading.Condition()
        self._calls = 0
        self._request_buffer = _RequestBuffer()
        self._pieces_received = 0  # grows while the user of the request buffer makes progress
        self._replacing = threading.Lock()

    def answer_with(self, begin: Begin | None) -> None:
        """Answer calls with exchanges from `begin`; None refuses them from now on, and waits for the calls under way."""
        self._set(begin)
        with self._calls_changed:
            self._calls_changed.wait_for(lambda: self._begin is not None or not self._calls)

    def close(self) -> None:
        """Refuse calls. A call under way fails when its connection is shut down."""
        self._set(None)

    def _set(self, begin: Begin | None) -> None:
        with self._calls_changed:
            self._begin = begin
        self._ready.set()

    def answer(self, connection: Connection, header: Header) -> None:
        """Answer all pieces of an exchange. If it fails, the exchange takes them back, and the connection ends."""
        peer = connection.peer.rank
        self._ready.wait()
        try:
            with self._buffers(connection, header) as (request, reply), self._counted_call() as begin:
                if begin is None:
                    raise RefusedError(peer, NO_CALLS)
                if header.is_other_layout(self._owner.layout):
                    raise RefusedError(peer, "another model")
                with begin(peer, request, reply) as exchange:
                    self._answer_pieces(connection, exchange, shared=header.shared >= 0)
        except RefusedError as error:
            if error.reason != NO_CALLS:
                self._owner.refused.count(error.reason, f"a call of learner {peer}")
            connection.refuse(error.reason)
            connection.drain()
            raise ConnectionAbortedError("the call was refused") from error

    def _answer_pieces(self, connection: Connection, exchange: Exchange, *, shared: bool) -> None:
        """Apply and answer each piece; the next one is on its way meanwhile. Returns when the caller confirms."""
        received = sent = 0
        for k, piece in enumerate(exchange.pieces):
            header = connection.receive_kind(Kind.PIECE)
            if not shared:
                connection.receive_into(piece, header)
                self._pieces_received += 1
            with failing_training(self._owner):
                exchange.apply(k)
            sent += connection.send(Header(Kind.REPLY, piece.nbytes), None if shared else piece)
            received += 0 if shared else piece.nbytes
        connection.receive_kind(Kind.CONFIRM)
        self._owner.traffic.received(received)
        self._owner.traffic.sent(connection.peer.rank, sent)

    @contextlib.contextmanager
    def _buffers(self, connection: Connection, header: Header) -> Iterator[tuple[Tensor, Tensor]]:
        """Where the request is, and where the reply goes: memory of the caller, or our one request buffer for both.

        If the peer whose call uses that buffer is frozen, the next call replaces the buffer and waits no longer.
        """
        if header.shared >= 0:
            reply = connection.memory.map(header.shared, header.nbytes)
            yield connection.memory.map(header.request, header.nbytes), reply
            return
        buffer = self._free_request_buffer()
        try:
            request = buffer.of_size(header.nbytes)
            yield request, request
        finally:
            buffer.lock.release()

    def _free_request_buffer(self) -> _RequestBuffer:
        """The request buffer, with its lock held."""
        while True:
            buffer, received = self._request_buffer, self._pieces_received
            if buffer.lock.acquire(timeout=STALL_S):
                return buffer
            with self._replacing:
                if self._request_buffer is buffer and self._pieces_received == received:
                    self._request_buffer = _RequestBuffer()

    @contextlib.contextmanager
    def _counted_call(self) -> Iterator[Begin | None]:
        """What answers one call; `answer_with(None)` waits for the end of this block."""
        with self._calls_changed:
            self._calls += 1
            begin = self._begin
        try:
            yield begin
        finally:
            with self._calls_changed:
                self._calls -= 1
                self._calls_changed.notify_all()
