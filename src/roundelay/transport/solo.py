"""A world of one learner: everything is done at once."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from torch import Tensor

from roundelay.clock import done
from roundelay.transport.base import Handler, Request, Transport, Undo


class SoloTransport(Transport):
    """No peers: sums are what they are, and there is nobody to call."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def swap(self, round: int, outgoing: Tensor, incoming: Mapping[int, Tensor]) -> Future[None]:
        """With nobody."""
        assert not incoming
        return done()

    def call(self, peer: int, buffer: Tensor, request: Request | None = None) -> Future[Tensor]:
        """Never asked for: a mixing of one learner has no neighbours."""
        raise AssertionError(f"there is no learner {peer} in a world of one")

    def serve(self, handler: Handler | None, undo: Undo | None = None) -> None:
        """Nobody calls."""

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """The sum of one."""
        return done()

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """To oneself."""
        return done()

    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        """All one of us have finished."""
        return done()

    def close(self, failure: str = "") -> None:
        """Nothing to release."""
