"""Who may connect: whoever proves to know the secret. Strangers can neither fill the house nor hold up others."""

from __future__ import annotations

import contextlib
import functools
import queue
import socket
import threading
import time
from collections.abc import Callable

from roundelay.transport import handshake
from roundelay.transport.handshake import Hello
from roundelay.transport.refusals import Refusals
from roundelay.transport.security import Security

STRANGERS = (
    64  # connections at most whose handshake is under way; of more the oldest is closed, for a learner's is soon over
)
BUSY_S = 0.05
HANDSHAKE = "handshake"

Welcome = Callable[[socket.socket, Hello], None]
"""Has a connection from now on, in a thread of its own, for as long as it likes."""


class Acceptor:
    """Accepts connections until it is closed; every handshake has a thread of its own, for a stranger may take his time.

    Args:
        listener: where they come.
        security: what every connection must prove to know.
        refused: counts those that do not.
        welcome: gets the others.
        rank: who answers.
        host: on which machine; zeros are like no other.
    """

    def __init__(
        self,
        listener: socket.socket,
        security: Security,
        refused: Refusals,
        welcome: Welcome,
        *,
        rank: int,
        host: bytes = bytes(16),
    ) -> None:
        self._listener, self._rank, self._host, self._security = listener, rank, host, security
        self._refused, self._welcome = refused, welcome
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []  # which have not proved anything yet, the oldest first
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._to_start: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._start("roundelay-accept", self._accept)
        self._start("roundelay-start", self._start_what_comes)

    @property
    def address(self) -> tuple[str, int]:
        """Where it is found."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.add(thread)  # after: close() joins what is here, and only a thread that has started can be joined

    def start(self, work: Callable[[], None]) -> None:
        """In a new thread, with the priority of those that the gate starts: a thread's own children would inherit its own."""
        self._to_start.put(work)

    def _start_what_comes(self) -> None:
        while (work := self._to_start.get()) is not None:
            self._start("roundelay-lane", work)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                self._refused.count(
                    HANDSHAKE, f"a connection ({error})"
                )  # too many are open: strangers' are closed soon
                time.sleep(BUSY_S)
                continue
            with contextlib.suppress(OSError):  # it has gone again, which the handshake will find out
                connection = self._security.wrapped(connection, answering=True)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._strangers.append(connection)
                too_many = self._strangers[0] if len(self._strangers) > STRANGERS else None
            if too_many is not None:
                hang_up(too_many)
            self._start("roundelay-lane", functools.partial(self._let_in, connection))

    def _let_in(self, stranger: socket.socket) -> None:
        try:
            connection, hello = handshake.accept(stranger, self._rank, self._host, self._security)
        except OSError as error:
            if not self._closed:
                self._refused.count(HANDSHAKE, f"a connection ({error})")
            return
        finally:
            with self._lock:
                self._strangers.remove(stranger)
        self._welcome(connection, hello)

    def close(self) -> None:
        """Let nobody in any more; who has been welcomed stays."""
        with self._lock:
            self._closed = True
            strangers = list(self._strangers)
        for connection in (self._listener, *strangers):
            hang_up(connection)
        self._listener.close()
        self._to_start.put(None)

    def join(self) -> None:
        """Wait until those who were welcomed have gone, and nobody is at the door."""
        for thread in list(self._threads):
            thread.join(handshake.HANDSHAKE_S)


def hang_up(connection: socket.socket) -> None:
    """Wake whoever waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
