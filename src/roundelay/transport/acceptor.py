"""Accepts connections from peers that prove that they know the run's secret."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable

from roundelay import threads
from roundelay.transport import handshake
from roundelay.transport.connections import shut_down
from roundelay.transport.handshake import Hello
from roundelay.transport.refusals import Refusals
from roundelay.transport.security import Security

MOST_UNAUTHENTICATED = 64  # if there are more, the oldest is closed: a learner's handshake takes only milliseconds
BUSY_S = 0.05
HANDSHAKE = "handshake"

Serve = Callable[[socket.socket, Hello], None]
"""Uses an authenticated connection, in a thread of its own, and may block until the connection ends."""


class Acceptor:
    """Accepts connections until it is closed. Each has its own thread, because a handshake may take seconds.

    Unauthenticated connections are capped and cannot block peers.

    Args:
        listener: the listening socket.
        security: the run's secret, which every connection must prove to know, and its certificate for TLS.
        refused: counts the connections that were not accepted.
        serve: called with every connection that was accepted.
        rank: this learner.
        host: id of this machine; zeros never match another one.
    """

    def __init__(
        self,
        listener: socket.socket,
        security: Security,
        refused: Refusals,
        serve: Serve,
        *,
        rank: int,
        host: bytes = bytes(16),
    ) -> None:
        self._listener, self._rank, self._host, self._security = listener, rank, host, security
        self._refused, self._serve = refused, serve
        self._lock = threading.Lock()
        self._unauthenticated: list[socket.socket] = []  # the oldest first
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._accepting = threads.start("accept", self._accept)

    @property
    def address(self) -> tuple[str, int]:
        """Where peers connect."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                self._refused.count(HANDSHAKE, f"a connection ({error})")  # too many are open; some will close soon
                time.sleep(BUSY_S)
                continue
            with contextlib.suppress(OSError):  # the other end has closed it already, so the handshake will fail
                connection = self._security.wrapped(connection, answering=True)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._unauthenticated.append(connection)
                oldest = self._unauthenticated[0] if len(self._unauthenticated) > MOST_UNAUTHENTICATED else None
                self._start_thread(connection)
            if oldest is not None:
                shut_down(oldest)

    def _start_thread(self, connection: socket.socket) -> None:
        """Serve the connection in its own thread. The caller holds the lock."""
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        try:
            self._threads.add(threads.start("serve", functools.partial(self._authenticate, connection)))
        except RuntimeError as error:  # too many threads are running; some will end soon
            self._refused.count(HANDSHAKE, f"a connection ({error})")
            self._unauthenticated.remove(connection)
            connection.close()

    def _authenticate(self, connection: socket.socket) -> None:
        try:
            authenticated, hello = handshake.accept(connection, self._rank, self._host, self._security)
        except OSError as error:
            if not self._closed:
                self._refused.count(HANDSHAKE, f"a connection ({error})")
            return
        finally:
            with self._lock:
                self._unauthenticated.remove(connection)
        self._serve(authenticated, hello)

    def close(self) -> None:
        """Accept no more connections. Those that are being served stay."""
        with self._lock:
            self._closed = True
            unauthenticated = list(self._unauthenticated)
        for connection in (self._listener, *unauthenticated):
            shut_down(connection)
        self._listener.close()

    def join(self) -> None:
        """Wait for the threads of connections whose sockets were shut down."""
        for thread in (self._accepting, *self._threads):
            thread.join(handshake.HANDSHAKE_S)
