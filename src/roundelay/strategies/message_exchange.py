"""Two learners give each other messages of equal length, piece by piece: both directions of a link are busy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from roundelay.clock import then
from roundelay.transport.base import Begin, Call, Transport

PIECE_BYTES = 2**20


class _End:
    """One end of the exchange. The first piece is a header.

    Attributes:
        pieces: of the buffer.
        nbytes: length of the buffer.
    """

    def __init__(self, buffer: Tensor, header: int) -> None:
        self.pieces, self.nbytes = [buffer[:header], *buffer[header:].split(PIECE_BYTES)], len(buffer)

    def prepare(self, k: int) -> None:
        """The message is in the buffer already."""

    def apply(self, k: int) -> None:
        """The reply has replaced the message in the buffer."""


class AnsweringEnd(_End):
    """The end that is asked.

    Args:
        request: a header and the peer's message.
        reply: takes a header and our message; it may be the same memory.
        header: length of the header.
        offered: called when the header has come. It writes the header of the reply, and returns our message; None: there is no
            message, so the pieces that follow are ignored.
        taken: called at the end with the peer's message, or with None if the exchange has failed at both ends.
    """

    def __init__(
        self,
        request: Tensor,
        reply: Tensor,
        header: int,
        offered: Callable[[], Tensor | None],
        taken: Callable[[Tensor | None], None],
    ) -> None:
        super().__init__(reply, header)
        self._request = request[header:].split(PIECE_BYTES)
        self._offered, self._taken = offered, taken
        self._message: tuple[Tensor, ...] | None = None
        self._received = torch.empty(0, dtype=torch.uint8)

    def apply(self, k: int) -> None:
        """Take piece k of the request, and put our own in its place."""
        if k == 0:
            message = self._offered()
            if message is not None:
                self._message, self._received = message.split(PIECE_BYTES), torch.empty_like(message)
        elif self._message is not None:
            self._received.split(PIECE_BYTES)[k - 1].copy_(self._request[k - 1])
            self.pieces[k].copy_(self._message[k - 1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._message is not None:
            self._taken(self._received if kind is None else None)


def exchange_messages(transport: Transport, peer: int, buffer: Tensor, header: int) -> Future[Tensor]:
    """Send a header and a message; those of the peer replace them, and are the result of the future."""
    begin: Begin = lambda peer, message, reply: contextlib.nullcontext(_End(reply, header))  # noqa: E731
    return then(transport.call(peer, Call(buffer, buffer, begin)), lambda _: buffer)
