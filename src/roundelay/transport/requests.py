"""What one learner asks of its peers: calls, pushes of a swap, and state; each in a thread of a small pool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from roundelay.errors import HandshakeError, RefusedError
from roundelay.threads import yield_to_computation
from roundelay.transport.base import Request, Transport
from roundelay.transport.connections import Connections
from roundelay.transport.framing import Connection, Header, Kind
from roundelay.transport.receiver import receive_payload
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

    def call(self, peer: int, buffer: Tensor, request: Request | None) -> Tensor:
        """Send the request, and wait for the reply in `buffer`."""
        with self._connections.to(peer) as connection:
            if (fd := self._shared_fd(connection, buffer)) >= 0:
                self._call_in_place(connection, buffer, fd, request)
                return buffer
            payload = request.pack(buffer) if request else buffer
            self._send(connection, Header(Kind.CALL, payload.nbytes, layout=self._owner.layout), payload)
            receive_payload(self._owner, connection, payload, self._answer(connection, Kind.REPLY))
            return payload

    def _call_in_place(self, connection: Connection, buffer: Tensor, fd: int, request: Request | None) -> None:
        """Through shared memory: the peer reads the request and writes the reply where they are."""
        request_fd = self._shared_fd(connection, request.memory) if request else -1
        if request:
            request.wait()
        if request and request_fd < 0:
            buffer.copy_(request.memory)
        layout = self._owner.layout
        self._send(connection, Header(Kind.CALL, buffer.nbytes, shared_fd=fd, request_fd=request_fd, layout=layout))
        self._answer(connection, Kind.REPLY)

    def fetch(self, peer: int) -> Tensor:
        """The state that `peer` offers."""
        with self._connections.to(peer) as connection:
            connection.send(Header(Kind.STATE, 0))
            header = self._answer(connection, Kind.STATE)
            state = torch.empty(header.nbytes, dtype=torch.uint8)
            receive_payload(self._owner, connection, state, header)
            return state

    def push(self, peer: int, round: int, outgoing: Tensor) -> None:
        """Our part of a swap: returns once `peer` has it, so that the buffer may change again."""
        with self._connections.to(peer) as connection:
            fd = self._shared_fd(connection, outgoing)
            header = Header(Kind.SWAP, outgoing.nbytes, round, fd, layout=self._owner.layout)
            for attempts_left in reversed(range(SWAP_ATTEMPTS)):
                self._send(connection, header, outgoing if fd < 0 else None)
                try:
                    self._answer(connection, Kind.RECEIVED)
                    return
                except RefusedError:  # it was altered on the way, and the peer still waits for it
                    if not attempts_left:
                        raise

    def _shared_fd(self, connection: Connection, buffer: Tensor) -> int:
        """Where the peer finds `buffer` in our shared memory, -1 if it cannot."""
        return self._memory.locate(buffer) if self._memory and connection.peer.host == self._host else -1

    def _send(self, connection: Connection, header: Header, payload: Tensor | None = None) -> None:
        self._owner.traffic.sent(connection.peer.rank, connection.send(header, payload))

    def _answer(self, connection: Connection, expected: Kind) -> Header:
        try:
            return connection.receive_answer(expected)
        except HandshakeError:
            self._owner.refused.count(HEADER, f"an answer of learner {connection.peer.rank}")
            raise
