"""A learner's connection to the rendezvous: one thread owns the socket, matches replies to requests, and reconnects."""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from roundelay import threads
from roundelay.cluster.rendezvous.messages import Message, MessageConnection
from roundelay.errors import DroppedError, RendezvousLostError
from roundelay.transport.heartbeats import BEAT_S, LOST_AFTER_S, NO_HEARTBEAT

log = logging.getLogger("roundelay")

PATIENCE_S = 300.0  # how long a request waits for a rendezvous that is away


class ReconnectingConnection:
    """Sends requests and receives replies, and connects again by itself whenever the connection is lost.

    Args:
        connect: opens a connection; raises OSError if that fails.
        on_message: called, in the connection's thread, with every message that is no reply.
        on_reconnected: called, in the connection's thread, after every reconnection. The requests that it makes go out before
            all others.

    Attributes:
        connected: whether the connection stands at the moment.
        dropped: why the run goes on without this learner. If set, every request raises DroppedError.
    """

    def __init__(
        self,
        connect: Callable[[], MessageConnection],
        on_message: Callable[[Message], None],
        on_reconnected: Callable[[], None],
    ) -> None:
        self._connect, self._on_message, self._on_reconnected = connect, on_message, on_reconnected
        self._lock = threading.RLock()  # on_reconnected makes requests while this lock is held
        self._waiting: dict[int, tuple[Message, Future[Message], bool]] = {}  # request, reply, whether to repeat it
        self._count = 0
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.dropped: str | None = None
        self._away_since = 0.0
        self._closing = False
        self._messages = connect()
        self.connected = True
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._thread = threads.start("rendezvous-client", self._run)

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
                return future.result(timeout=BEAT_S)
            except TimeoutError:
                if not self.connected and time.monotonic() - self._away_since > patience_s:
                    raise RendezvousLostError(f"the rendezvous has been away for {patience_s:g} s") from None

    def send(self, message: Message) -> None:
        """Have the thread send a message that needs no reply."""
        with self._lock:
            self._outbox.put(message)
        self._wake()

    def drop(self, reason: str) -> None:
        """Fail all requests with DroppedError: those that wait and, until `dropped` is reset, those to come."""
        self.dropped = reason
        self._fail(DroppedError(reason))

    def close(self, farewell: Message) -> None:
        """Send a last message if the connection stands, close it, and wait until the thread has ended. Idempotent."""
        if not self._closing:
            self._outbox.put(farewell)
            self._closing = True
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"!")

    # The connection's thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._serve()
            except OSError as error:
                self._messages.close()
                if not self._closing:
                    self._reconnect(error)
        self._messages.close()
        self._fail(ConnectionError("this learner has closed its connection to the rendezvous"))
        self._wake_reader.close()
        self._wake_writer.close()

    def _serve(self) -> None:
        """Send and receive until the connection is closed. Raises OSError when it is lost."""
        heard, due = time.monotonic(), 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            selector.register(self._messages.socket, selectors.EVENT_READ, self._messages)
            while not self._closing or not self._outbox.empty():
                now = time.monotonic()
                if now >= due:
                    due = now + BEAT_S
                    self._messages.send({"kind": "heartbeat"})
                if now - heard > LOST_AFTER_S:
                    raise ConnectionError(NO_HEARTBEAT)
                while not self._outbox.empty():
                    self._messages.send(self._outbox.get())
                for key, _ in selector.select(timeout=max(due - now, 0.0)):
                    if key.data is None:
                        self._wake_reader.recv(4096)
                        continue
                    for message in self._messages.receive():
                        self._received(message)
                    heard = time.monotonic()
                heard += max(
                    time.monotonic() - now - 2 * BEAT_S, 0.0
                )  # our own process was suspended, so the rendezvous was not silent

    def _received(self, message: Message) -> None:
        if message["kind"] != "reply":
            self._on_message(message)
            return
        with self._lock:
            _, future, _ = self._waiting.pop(message["request"], (None, None, None))
        if future is not None:
            with contextlib.suppress(InvalidStateError):
                future.set_result(message)

    def _reconnect(self, error: OSError) -> None:
        """Try to connect until it succeeds or the connection is closed."""
        with self._lock:
            self.connected, self._away_since = False, time.monotonic()
        log.warning("lost the rendezvous (%s); going on without it", error)
        self._fail(RendezvousLostError("the rendezvous is away"), even_repeated=False)
        while not self._closing:
            try:
                self._messages = self._connect()
            except OSError:
                time.sleep(BEAT_S)
                continue
            self._send_again()
            return

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
