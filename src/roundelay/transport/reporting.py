"""What the threads of a transport report to it: payloads that came, messages that were refused, and errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from roundelay.errors import RefusedError
from roundelay.transport.base import Transport
from roundelay.transport.framing import Connection, Header


def receive_payload(owner: Transport, connection: Connection, buffer: Tensor, header: Header) -> None:
    """Receive what a header has announced, and count it. Raises RefusedError if it was altered on the way."""
    try:
        connection.receive_into(buffer, header)
    except RefusedError as error:
        owner.refused.count(error.reason, f"a message of learner {connection.peer.rank}")
        raise
    owner.traffic.received(buffer.nbytes)


@contextlib.contextmanager
def failing_training(owner: Transport) -> Iterator[None]:
    """Have the training thread raise what goes wrong in this block, and end the connection. RefusedError passes.

    An OSError in this block counts as our own failure, not as a broken connection. So do not use a connection in it.
    """
    try:
        yield
    except RefusedError:
        raise
    except BaseException as error:
        owner.fail(error)
        raise ConnectionAbortedError("this learner has failed") from error
