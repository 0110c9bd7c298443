"""What one learner asks of its peers: calls, pushes of a swap, and state; each in a thread of a small pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from roundelay.errors import HandshakeError, RefusedError
from roundelay.threads import yield_to_computation
from roundelay.transport.base import Call, Exchange, Swap, Transport
from roundelay.transport.connections import Connections
from roundelay.transport.framing import HEADER_BYTES, Connection, Header, Kind
from roundelay.transport.reporting import receive_payload
from roundelay.transport.shared_memory import SharedMemory

Result = TypeVar("Result")

SWAP_ATTEMPTS = 3
MOST_THREADS = 32
HEADER = "header"


class Requests:
    """Sends requests and reads their answers, over TCP or through shared memory.

    Args:
        owner: its traffic and refusals are counted, and its layout is sent.
        connections: to the peers.
        memory: our shared memory; None: not shared.
        host: id of this machine.
    """

    def __init__(self, owner: Transport, connections: Connections, memory: SharedMemory | None, host: bytes) -> None:
        self._owner, self._connections, self._memory, self._host = owner, connections, memory, host
        self._pool = ThreadPoolExecutor(
            max(2, min(owner.size, MOST_THREADS)), "roundelay-request", yield_to_computation
        )

    def submit(self, work: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Run `work` in a thread of the pool."""
        return self._pool.submit(work, *arguments)

    def close(self) -> None:
        """Wait for the requests under way; no more may be submitted."""
        self._pool.shutdown(wait=True)

    def call(self, peer: int, call: Call) -> None:
        """Exchange with `peer`: send the pieces of the request, and apply the replies as they come."""
        with self._connections.to(peer) as connection:
            places = self._shared(connection, call.buffer), self._shared(connection, call.memory)
            shared = min(places) >= 0
            with call.begin(peer, call.memory if shared else call.buffer, call.buffer) as exchange:
                header = Header(Kind.CALL, exchange.nbytes, 0, *(places if shared else (-1, -1)), self._owner.layout)
                with connection.sending(_requests(header, exchange, shared=shared)):
                    for k, piece in enumerate(exchange.pieces):
                        answer = self._answer(connection, Kind.REPLY)
                        if not shared:
                            receive_payload(self._owner, connection, piece, answer)
                        self._apply(peer, exchange, k)
                connection.send(Header(Kind.CONFIRM, 0))
            payload = 0 if shared else sum(piece.nbytes for piece in exchange.pieces)
            self._owner.traffic.sent(peer, HEADER_BYTES * (len(exchange.pieces) + 2) + payload)

    def _apply(self, peer: int, exchange: Exchange, k: int) -> None:
        try:
            exchange.apply(k)
        except RefusedError as error:
            self._owner.refused.count(error.reason, f"a reply of learner {peer}")
            raise

    def fetch(self, peer: int) -> Tensor:
        """The state that `peer` offers."""
        with self._connections.to(peer) as connection:
            connection.send(Header(Kind.STATE, 0))
            header = self._answer(connection, Kind.STATE)
            state = torch.empty(header.nbytes, dtype=torch.uint8)
            receive_payload(self._owner, connection, state, header)
            return state

    def push(self, peer: int, swap: Swap) -> None:
        """Our part of a swap: returns once `peer` has it, so that the buffer may change again."""
        swap.wait()
        with self._connections.to(peer) as connection:
            place = self._shared(connection, swap.outgoing)
            header = Header(Kind.SWAP, swap.outgoing.nbytes, swap.round, place, layout=self._owner.layout)
            for attempts_left in reversed(range(SWAP_ATTEMPTS)):
                sent = connection.send(header, swap.outgoing if place < 0 else None)
                self._owner.traffic.sent(peer, sent)
                try:
                    self._answer(connection, Kind.RECEIVED)
                    return
                except RefusedError:  # it was altered on the way, and the peer still waits for it
                    if not attempts_left:
                        raise

    def _shared(self, connection: Connection, buffer: Tensor) -> int:
        """Where the peer finds `buffer` in our shared memory; -1 if the peer cannot map it."""
        return self._memory.locate(buffer) if self._memory and connection.peer.host == self._host else -1

    def _answer(self, connection: Connection, expected: Kind) -> Header:
        try:
            return connection.receive_kind(expected)
        except HandshakeError:
            self._owner.refused.count(HEADER, f"an answer of learner {connection.peer.rank}")
            raise


def _requests(header: Header, exchange: Exchange, *, shared: bool) -> Iterator[tuple[Header, Tensor | None]]:
    """The messages of a call. Each piece is prepared when the one before it was sent."""
    yield header, None
    for k, piece in enumerate(exchange.pieces):
        exchange.prepare(k)
        yield Header(Kind.PIECE, piece.nbytes), None if shared else piece
