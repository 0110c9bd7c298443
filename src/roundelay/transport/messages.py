"""Calls with one whole message and one whole reply, for what does not travel in pieces."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from torch import Tensor

from roundelay.clock import then
from roundelay.transport.base import Begin, Call, Transport

Handler = Callable[[int, Tensor, Tensor], None]
"""Answers a message: (peer, message, reply), two buffers of the same length, or the same buffer twice.

It reads the message once and fills the reply. A handler that has changed nothing may raise RefusedError: then the call fails
with it.
"""


class _Message:
    """One end of an exchange that consists of one piece."""

    def __init__(self, buffer: Tensor, apply: Callable[[], None] = lambda: None) -> None:
        self.pieces, self.nbytes, self._apply = [buffer], buffer.nbytes, apply

    def prepare(self, k: int) -> None:
        """The message is in the buffer already."""

    def apply(self, k: int) -> None:
        self._apply()


def ask(transport: Transport, peer: int, buffer: Tensor) -> Future[Tensor]:
    """Send the bytes of `buffer` to `peer`. The reply replaces them, and is the result of the future."""
    begin: Begin = lambda peer, message, reply: contextlib.nullcontext(_Message(reply))  # noqa: E731
    return then(transport.call(peer, Call(buffer, buffer, begin, streams=False)), lambda _: buffer)


def answering(handler: Handler) -> Begin:
    """For `Transport.serve`: answer every message with `handler`, one at a time. Its changes are not taken back."""
    one_at_a_time = threading.Lock()

    @contextlib.contextmanager
    def begin(peer: int, message: Tensor, reply: Tensor) -> Iterator[_Message]:
        def answer() -> None:
            with one_at_a_time:
                handler(peer, message, reply)

        yield _Message(reply, answer)

    return begin
