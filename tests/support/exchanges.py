"""Calls whose request and reply are plain bytes, for tests of transports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from torch import Tensor

from roundelay.transport.base import Begin, Call, Transport

Handler = Callable[[int, Tensor, Tensor], object]
PIECE_BYTES = 2**20


class Bytes:
    """One end of an exchange of bytes. `answer` turns a piece of the request into a piece of the reply."""

    def __init__(self, request: Tensor, reply: Tensor, answer: Callable[[Tensor, Tensor], object]) -> None:
        self.nbytes, self.pieces = reply.nbytes, list(reply.split(PIECE_BYTES))
        self._requests, self._answer = request.split(PIECE_BYTES), answer

    def prepare(self, k: int) -> None:
        pass

    def apply(self, k: int) -> None:
        self._answer(self._requests[k], self.pieces[k])


def answering(handler: Handler, undone: Handler | None = None) -> Begin:
    """Answers calls with `handler`(peer, request, reply), piece by piece; `undone` is told if the exchange fails."""

    @contextlib.contextmanager
    def begin(peer: int, request: Tensor, reply: Tensor) -> Iterator[Bytes]:
        try:
            yield Bytes(request, reply, lambda asked, answered: handler(peer, asked, answered))
        except BaseException:
            if undone:
                undone(peer, request, reply)
            raise

    return begin


def calling(buffer: Tensor, memory: Tensor | None = None) -> Call:
    """Sends the bytes of `buffer`, or of `memory` if given; the reply replaces those of `buffer`."""
    source = buffer if memory is None else memory

    @contextlib.contextmanager
    def begin(peer: int, request: Tensor, reply: Tensor) -> Iterator[Bytes]:
        if request is reply and memory is not None:
            reply.copy_(memory)
        yield Bytes(request, reply, lambda asked, answered: None)

    return Call(source, buffer, begin)


def call(transport: Transport, peer: int, buffer: Tensor) -> Future[None]:
    """Call `peer` with the bytes of `buffer`."""
    return transport.call(peer, calling(buffer))
