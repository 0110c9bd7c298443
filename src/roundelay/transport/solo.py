"""A world of one learner: everything is done at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from roundelay.clock import done
from roundelay.transport.base import Address, Begin, Call, Swap, Transport


class SoloTransport(Transport):
    """No peers: a sum over one learner is its own values, and there is no peer to call."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)
        self._failure: BaseException | None = None

    def swap(self, swap: Swap) -> Future[None]:
        """Done at once: there is no neighbour."""
        assert not swap.incoming
        return done()

    def call(self, peer: int, call: Call) -> Future[None]:
        """Never asked for: a mixing of one learner has no neighbours."""
        raise AssertionError(f"there is no learner {peer} in a world of one")

    def serve(self, begin: Begin | None) -> None:
        """There is no peer that could call."""

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """The values are the sum already."""
        return done()

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """The values are there already."""
        return done()

    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Done at once."""
        return done()

    def close(self, failure: str = "") -> None:
        """Nothing to release."""

    def offer(self, state: Callable[[], Tensor]) -> None:
        """There is no peer that could fetch it."""

    def fetch(self, peer: int) -> Future[Tensor]:
        """Never asked for."""
        raise AssertionError(f"there is no learner {peer} in a world of one")

    def admit(self, peer: int, address: Address) -> None:
        """Never asked for: the world stays as it is."""
        raise AssertionError("no learner can join a world of one")

    def lose(self, peer: int, reason: str) -> None:
        """There is no peer to lose."""

    def fail(self, error: BaseException) -> None:
        """The next `check` raises it."""
        self._failure = self._failure or error

    def check(self) -> None:
        """Raise what `fail` was given."""
        if self._failure is not None:
            raise self._failure

    @property
    def lost(self) -> dict[int, str]:
        """Empty."""
        return {}
