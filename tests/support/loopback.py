"""Several learners in one process: real sockets on the loopback, one thread each, and sums computed in memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from roundelay.transport import handshake
from roundelay.transport.base import Collectives
from roundelay.transport.framing import Connection
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.security import Security
from roundelay.transport.tcp import TcpTransport

PATIENCE_S = 30.0
T = TypeVar("T")


class Gatherings:
    """The sums and broadcasts under way between all learners of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[tuple[tuple[int, ...], int], dict[int, tuple[Tensor, Future[None]]]] = {}

    def join(
        self, rank: int, values: Tensor, members: tuple[int, ...], number: int, source: int | None
    ) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            given = self._under_way.setdefault((members, number), {})
            given[rank] = (values, future)
            if len(given) < len(members):
                return future
            del self._under_way[members, number]
        # In NumPy, so that tests which count what torch allocates do not count this.
        arrays = [given[member][0].numpy() for member in (members if source is None else (source,))]
        result = sum(arrays[1:], start=arrays[0].copy())
        for each, _ in given.values():
            each.numpy()[...] = result
        for _, ended in given.values():
            with contextlib.suppress(InvalidStateError):  # its learner has lost a peer meanwhile
                ended.set_result(None)
        return future


class LocalCollectives(Collectives):
    """The collectives of one learner."""

    def __init__(self, rank: int, gatherings: Gatherings) -> None:
        self._rank, self._gatherings = rank, gatherings
        self._numbers: Counter[tuple[int, ...]] = Counter()

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        return self._join(values, members, None)

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        return self._join(values, members, source)

    def _join(self, values: Tensor, members: tuple[int, ...], source: int | None) -> Future[None]:
        self._numbers[members] += 1
        return self._gatherings.join(self._rank, values, members, self._numbers[members], source)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def loopback(
    size: int, *, share_memory: bool | list[bool] = True, security: Security | None = None
) -> Iterator[list[TcpTransport]]:
    """Connected transports, closed at the end."""
    security, gatherings = security or Security(secrets.token_bytes(32)), Gatherings()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    addresses = {rank: listener.getsockname()[:2] for rank, listener in enumerate(listeners)}
    shares = share_memory if isinstance(share_memory, list) else [share_memory] * size
    transports = [
        TcpTransport(
            rank, size, listeners[rank], security, LocalCollectives(rank, gatherings), share_memory=shares[rank]
        )
        for rank in range(size)
    ]
    try:
        for transport in transports:
            transport.connect({rank: address for rank, address in addresses.items() if rank != transport.rank})
        yield transports
    finally:
        for transport in transports:
            transport.close()


def raw_connection(transport: TcpTransport, rank: int = 1) -> Connection:
    """A connection to `transport` after the handshake, in the name of learner `rank`, on which a test sends any bytes."""
    hello = Hello(rank, Purpose.REQUESTS, os.getpid(), bytes(16))
    security = transport._connections._security
    connection = Connection(*handshake.connect(transport.address, hello, transport.rank, security))
    connection.socket.settimeout(PATIENCE_S)
    return connection


def together(size: int, work: Callable[[int], T]) -> list[T]:
    """work(0), work(1), ... in one thread each; their results, or the first exception."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
        return [future.result(PATIENCE_S) for future in futures]


def outcomes(size: int, work: Callable[[int], T]) -> list[T | BaseException]:
    """As `together`, but exceptions are returned, not raised."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
        return [future.exception(PATIENCE_S) or future.result() for future in futures]
