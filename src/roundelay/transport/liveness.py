"""Which peers are gone, and the futures that fail with them."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError

from roundelay.errors import PeerLostError


class Liveness:
    """What one learner knows of its peers. Thread-safe.

    A peer that *left* has finished in order: what it had begun with us will still end, but nothing new can depend on it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lost: dict[int, str] = {}
        self._left: set[int] = set()
        self._dependents: list[tuple[tuple[int, ...], Future[None]]] = []
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def lost(self) -> dict[int, str]:
        """The peers that are gone, and why."""
        with self._changed:
            return dict(self._lost)

    def depending_on(self, peers: tuple[int, ...], under_way: Future[None] | None = None) -> Future[None]:
        """A future that fails, now or later, when one of `peers` is lost or `fail` is called.

        If `under_way` is given, it is returned instead of a new future, and a peer that has left does not fail it.
        """
        future: Future[None] = Future() if under_way is None else under_way
        with self._changed:
            self._dependents = [entry for entry in self._dependents if not entry[1].done()]
            self._dependents.append((peers, future))
            harmless = self._left if under_way else set()
            gone = next((peer for peer in peers if peer in self._lost and peer not in harmless), None)
            error = self._failure or (None if gone is None else PeerLostError(gone, self._lost[gone]))
        if error is not None:
            settle(future, error)
        return future

    def hopeless(self, members: tuple[int, ...]) -> bool:
        """Whether a collective of these members can never end."""
        with self._changed:
            return self._failure is not None or not self._lost.keys().isdisjoint(members)

    def lose(self, peer: int, reason: str, *, left: bool = False) -> bool:
        """Mark `peer` as gone; False if it was already. Unless it left, futures that depend on it fail."""
        with self._changed:
            if peer in self._lost:
                return False
            self._lost[peer] = reason
            if left:
                self._left.add(peer)
            failing = [] if left else [future for peers, future in self._dependents if peer in peers]
            self._changed.notify_all()
        for future in failing:
            settle(future, PeerLostError(peer, reason))
        return True

    def admit(self, peer: int) -> None:
        """`peer` takes part again."""
        with self._changed:
            self._lost.pop(peer, None)
            self._left.discard(peer)

    def raise_if_lost(self, peer: int) -> None:
        """Raise PeerLostError if `peer` is gone or this learner has closed."""
        with self._changed:
            if peer in self._lost:
                raise PeerLostError(peer, self._lost[peer])
            if self._closed:
                raise PeerLostError(peer, "this learner has closed")

    def reason(self, peer: int, timeout_s: float) -> str | None:
        """Why `peer` is gone. Waits, since the failure detector may report it in a moment; None if it does not."""
        with self._changed:
            self._changed.wait_for(lambda: peer in self._lost or self._closed, timeout_s)
            return self._lost.get(peer)

    def fail(self, error: BaseException) -> None:
        """Have all pending futures, and `check`, raise `error`. The first error counts."""
        with self._changed:
            self._failure = self._failure or error
            failing = [future for _, future in self._dependents]
        for future in failing:
            settle(future, error)

    def check(self) -> None:
        """Raise what `fail` was given."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wake all threads that wait for a reason."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def settle(future: Future[None], error: BaseException | None) -> None:
    """Complete a future that another thread may have completed first."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error) if error else future.set_result(None)
