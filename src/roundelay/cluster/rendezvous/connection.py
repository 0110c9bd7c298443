"""A learner's connection to the rendezvous over TCP: one thread owns the socket, and connects again when it is lost."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from roundelay import threads
from roundelay.cluster.rendezvous.awaited_replies import AwaitedReplies
from roundelay.cluster.rendezvous.messages import Message, MessageConnection
from roundelay.transport.heartbeats import BEAT_S, NO_HEARTBEAT, Heartbeats

_RENDEZVOUS = 0  # the only peer of this connection


class ReconnectingConnection(AwaitedReplies):
    """Sends requests and receives replies in a thread, and connects again by itself whenever the connection is lost.

    Args:
        connect: opens a connection; raises OSError if that fails.
        on_message: called, in the connection's thread, with every message that is no reply.
        on_reconnected: called, in the connection's thread, after every reconnection.
    """

    def __init__(
        self,
        connect: Callable[[], MessageConnection],
        on_message: Callable[[Message], None],
        on_reconnected: Callable[[], None],
    ) -> None:
        super().__init__(on_message, on_reconnected)
        self._connect = connect
        self._closing = False
        self._messages = connect()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._thread = threads.start("rendezvous-client", self._run)

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
        heartbeats, due = Heartbeats(time.monotonic), 0.0
        heartbeats.heard(_RENDEZVOUS)
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            selector.register(self._messages.socket, selectors.EVENT_READ, self._messages)
            while not self._closing or not self._outbox.empty():
                now = time.monotonic()
                if now >= due:
                    due = now + BEAT_S
                    self._messages.send({"kind": "heartbeat"})
                    if heartbeats.lost():
                        raise ConnectionError(NO_HEARTBEAT)
                while not self._outbox.empty():
                    self._messages.send(self._outbox.get())
                for key, _ in selector.select(timeout=max(due - now, 0.0)):
                    if key.data is None:
                        self._wake_reader.recv(4096)
                        continue
                    for message in self._messages.receive():
                        self._received(message)
                    heartbeats.heard(_RENDEZVOUS)

    def _reconnect(self, error: OSError) -> None:
        """Try to connect until it succeeds or the connection is closed."""
        self._lost(error, time.monotonic())
        while not self._closing:
            try:
                self._messages = self._connect()
            except OSError:
                time.sleep(BEAT_S)
                continue
            self._send_again()
            return
