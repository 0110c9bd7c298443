"""Several learners in one process: real sockets on the loopback, one thread each, and sums that meet in memory."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from roundelay.transport.base import Collectives
from roundelay.transport.security import Security
from roundelay.transport.tcp import TcpTransport

PATIENCE_S = 30.0
T = TypeVar("T")


class Meeting:
    """Where the sums and broadcasts of all learners of one process meet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parties: dict[tuple[tuple[int, ...], int], dict[int, tuple[Tensor, Future[None]]]] = {}

    def join(
        self, rank: int, values: Tensor, members: tuple[int, ...], number: int, source: int | None
    ) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            party = self._parties.setdefault((members, number), {})
            party[rank] = (values, future)
            if len(party) < len(members):
                return future
            del self._parties[members, number]
        # In NumPy, so that tests which count what torch allocates do not count this.
        arrays = [party[member][0].numpy() for member in (members if source is None else (source,))]
        result = sum(arrays[1:], start=arrays[0].copy())
        for mine, _ in party.values():
            mine.numpy()[...] = result
        for _, ended in party.values():
            with contextlib.suppress(InvalidStateError):  # its learner has lost a peer meanwhile
                ended.set_result(None)
        return future


class MeetingCollectives(Collectives):
    """One learner's seat at a Meeting."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting
        self._numbers: Counter[tuple[int, ...]] = Counter()

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        return self._join(values, members, None)

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        return self._join(values, members, source)

    def _join(self, values: Tensor, members: tuple[int, ...], source: int | None) -> Future[None]:
        self._numbers[members] += 1
        return self._meeting.join(self._rank, values, members, self._numbers[members], source)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def loopback(
    size: int, *, share_memory: bool | list[bool] = True, security: Security | None = None
) -> Iterator[list[TcpTransport]]:
    """Connected transports, closed at the end."""
    security, meeting = security or Security(secrets.token_bytes(32)), Meeting()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    addresses = {rank: listener.getsockname()[:2] for rank, listener in enumerate(listeners)}
    shares = share_memory if isinstance(share_memory, list) else [share_memory] * size
    transports = [
        TcpTransport(
            rank, size, listeners[rank], security, MeetingCollectives(rank, meeting), share_memory=shares[rank]
        )
        for rank in range(size)
    ]
    try:
        for transport in transports:
            transport.connect({rank: place for rank, place in addresses.items() if rank != transport.rank})
        yield transports
    finally:
        for transport in transports:
            transport.close()


def together(size: int, work: Callable[[int], T]) -> list[T]:
    """work(0), work(1), ... in one thread each; their results, or the first exception."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
        return [future.result(PATIENCE_S) for future in futures]


def outcomes(size: int, work: Callable[[int], T]) -> list[T | BaseException]:
    """As `together`, but an exception is a result like any other."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
        return [future.exception(PATIENCE_S) or future.result() for future in futures]
