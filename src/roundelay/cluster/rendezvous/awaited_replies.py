"""The requests of a learner that wait for a reply of the rendezvous, and what becomes of them when the connection is lost."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from roundelay import waiting
from roundelay.cluster.rendezvous.messages import Message
from roundelay.errors import DroppedError, RendezvousLostError
from roundelay.transport.heartbeats import BEAT_S

log = logging.getLogger("roundelay")

PATIENCE_S = 300.0  # how long a request waits for a rendezvous that is away


class AwaitedReplies(ABC):
    """Queues requests and matches replies to them. A subclass carries the messages, and connects again when it must.

    Args:
        on_message: called, where messages are received, with every message that is no reply.
        on_reconnected: called after every reconnection. The requests that it makes go out before all others.

    Attributes:
        connected: whether the connection stands at the moment.
        dropped: why the run goes on without this learner. If set, every request raises DroppedError.
    """

    def __init__(self, on_message: Callable[[Message], None], on_reconnected: Callable[[], None]) -> None:
        self._on_message, self._on_reconnected = on_message, on_reconnected
        self._lock = threading.RLock()  # on_reconnected makes requests while this lock is held
        self._waiting: dict[int, tuple[Message, Future[Message], bool]] = {}  # request, reply, whether to repeat it
        self._count = 0
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.dropped: str | None = None
        self._away_since = 0.0
        self.connected = True

    def request(self, kind: str, *, repeat: bool = False, **fields: Any) -> Future[Message]:  # noqa: ANN401
        """Send a request; the future gives the reply.

        If the connection is lost before the reply, a request with `repeat` is sent again after the reconnection. A
        request without `repeat` fails with RendezvousLostError; this method raises it if there is no connection now.
        """
        future: Future[Message] = Future()
        with self._lock:
            if self.dropped is not None:
                raise DroppedError(self.dropped)
            if not (repeat or self.connected):
                raise RendezvousLostError("the rendezvous is away")
            self._count += 1
            message = {"kind": kind, "request": self._count} | fields
            self._waiting[self._count] = message, future, repeat
            self.send(message)
        return future

    def ask(self, kind: str, patience_s: float = PATIENCE_S, *, repeat: bool = False, **fields: Any) -> Message:  # noqa: ANN401
        """Send a request and wait for the reply, without limit while the connection stands.

        Raises RendezvousLostError if the rendezvous is away for more than `patience_s`.
        """
        future = self.request(kind, repeat=repeat, **fields)
        while True:
            try:
                return waiting.result(future, BEAT_S)
            except TimeoutError:
                if not self.connected and waiting.now() - self._away_since > patience_s:
                    raise RendezvousLostError(f"the rendezvous has been away for {patience_s:g} s") from None

    def send(self, message: Message) -> None:
        """Queue a message that needs no reply."""
        with self._lock:
            self._outbox.put(message)
        self._wake()

    def drop(self, reason: str) -> None:
        """Fail all requests with DroppedError: those that wait and, until `dropped` is reset, those to come."""
        self.dropped = reason
        self._fail(DroppedError(reason))

    @abstractmethod
    def close(self, farewell: Message) -> None:
        """Send a last message if the connection stands, and close it. Idempotent."""

    @abstractmethod
    def _wake(self) -> None:
        """Send what is in the outbox."""

    def _received(self, message: Message) -> None:
        if message["kind"] != "reply":
            self._on_message(message)
            return
        with self._lock:
            _, future, _ = self._waiting.pop(message["request"], (None, None, None))
        if future is not None:
            with contextlib.suppress(InvalidStateError):
                future.set_result(message)

    def _lost(self, error: Exception, now: float) -> None:
        """The connection is lost: requests that are not repeated fail."""
        with self._lock:
            self.connected, self._away_since = False, now
        log.warning("lost the rendezvous (%s); going on without it", error)
        self._fail(RendezvousLostError("the rendezvous is away"), even_repeated=False)

    def _send_again(self) -> None:
        """Queue what `on_reconnected` sends, then unsent messages that need no reply, then the requests to repeat."""
        with self._lock:
            self.connected = True
            repeated = [message for message, *_ in self._waiting.values()]
            unsent = []
            while not self._outbox.empty():
                unsent.append(self._outbox.get())
            self._on_reconnected()
            for message in [*(each for each in unsent if "request" not in each), *repeated]:
                self._outbox.put(message)

    def _fail(self, error: BaseException, *, even_repeated: bool = True) -> None:
        with self._lock:
            failing = [number for number, (*_, repeat) in self._waiting.items() if even_repeated or not repeat]
            futures = [self._waiting.pop(number)[1] for number in failing]
        for future in futures:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
