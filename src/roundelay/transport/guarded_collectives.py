"""Collectives that fail as soon as a member is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from roundelay.clock import done
from roundelay.transport.base import Collectives, Traffic
from roundelay.transport.liveness import Liveness, settle


class GuardedCollectives(Collectives):
    """Sums and broadcasts whose futures fail when a member is lost.

    Args:
        inner: sums and broadcasts that may hang in that case.
        liveness: which peers are gone.
        traffic: counts the bytes of sums.
    """

    def __init__(self, inner: Collectives, liveness: Liveness, traffic: Traffic) -> None:
        self._inner, self._liveness, self._traffic = inner, liveness, traffic

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Sum over members. Nothing is sent for an empty tensor: a process may hold no row of a sharded model."""
        if not values.numel():
            return done()  # an empty sum is no barrier: a member that is done with it may have left already
        self._traffic.reduced(values.nbytes, len(members))
        return self._guarded(members, lambda: self._inner.all_reduce(values, members))

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Give every member the values of `source`."""
        return self._guarded(members, lambda: self._inner.broadcast(values, source, members))

    def use_generation(self, generation: int) -> None:
        """Form new groups from now on."""
        self._inner.use_generation(generation)

    def close(self) -> None:
        """Release everything."""
        self._inner.close()

    def _guarded(self, members: tuple[int, ...], start: Callable[[], Future[None]]) -> Future[None]:
        try:
            return self._liveness.depending_on(members, None if self._liveness.hopeless(members) else start())
        except ConnectionError as error:
            future = self._liveness.depending_on(members)
            settle(future, error)  # unless it has failed already, because a member is lost
            return future
