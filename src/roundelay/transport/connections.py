"""The TCP connections of one learner to its peers, and from them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

from roundelay.errors import PeerLostError
from roundelay.transport import handshake
from roundelay.transport.base import Address
from roundelay.transport.framing import Connection
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.heartbeats import BEAT_S
from roundelay.transport.liveness import Liveness
from roundelay.transport.security import Security


class _Outgoing:
    """Our connection to one peer; opened when first used.

    Attributes:
        lock: held for the length of a request.
        replaced: the peer has come back, so a request that still uses this connection says nothing about the peer.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self.replaced = False

    def replace(self) -> None:
        """Wake the request under way, then close the connection."""
        self.replaced = True
        if (connection := self.connection) is not None:
            shut_down(connection.socket)
            with self.lock:  # a file descriptor must not be closed, and used again, while a thread reads from it
                self.close()

    def close(self) -> None:
        """Close the connection; the next request opens a new one. The caller holds the lock."""
        if self.connection is not None:
            self.connection.socket.close()
            self.connection = None


class Connections:
    """One connection per ordered pair of learners: only the side that connected sends requests on it.

    So two learners that call each other at the same time never mix up whose answer comes next. When a peer is lost its
    sockets are shut down, which wakes the threads that are blocked on them.

    Args:
        rank: this learner.
        host: id of this machine, equal for processes that can map each other's memory.
        security: the run's secret, which every connection must prove to know, and its certificate for TLS.
        liveness: which peers are gone.
        lose: called with a peer whose connection broke, and why.
    """

    def __init__(
        self, rank: int, host: bytes, security: Security, liveness: Liveness, lose: Callable[[int, str], None]
    ) -> None:
        self._rank, self._host, self._security = rank, host, security
        self._liveness, self._lose = liveness, lose
        self._lock = threading.Lock()  # guards the four below
        self._addresses: dict[int, Address] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: set[Connection] = set()
        self._closed = False

    def set_addresses(self, addresses: Mapping[int, Address]) -> None:
        """Learn where the peers are."""
        with self._lock:
            self._addresses = dict(addresses)

    def admit(self, peer: int, address: Address) -> None:
        """`peer` is at this address from now on; a connection to where it was is closed."""
        with self._lock:
            self._addresses[peer] = address
        self.reopen(peer)

    def reopen(self, peer: int) -> None:
        """`peer` is where it was, and can be reached again; a connection from before is closed."""
        with self._lock:
            before = self._outgoing.pop(peer, None)
        if before is not None:
            before.replace()

    def open_heartbeat(self, peer: int, purpose: Purpose = Purpose.HEARTBEAT) -> socket.socket:
        """A new connection for heartbeats. Raises OSError if the peer does not answer."""
        hello = Hello(self._rank, purpose, os.getpid(), self._host)
        connection, _ = handshake.connect(self._addresses[peer], hello, peer, self._security)
        return connection

    @contextlib.contextmanager
    def to(self, peer: int) -> Iterator[Connection]:
        """Our connection to `peer`, for one request.

        Raises PeerLostError, with what the failure detector knows, if the connection breaks in this block.
        """
        with self._lock:
            outgoing = self._outgoing.setdefault(peer, _Outgoing())
        try:
            with outgoing.lock:
                self._liveness.raise_if_lost(peer)
                if outgoing.connection is None:  # not under `self._lock`: a frozen peer must not block the others
                    hello = Hello(self._rank, Purpose.REQUESTS, os.getpid(), self._host)
                    opened = handshake.connect(self._addresses[peer], hello, peer, self._security)
                    outgoing.connection = Connection(*opened)
                    # The peer was lost or replaced meanwhile, before this socket could be shut down.
                    if outgoing.replaced:
                        outgoing.connection.socket.close()
                    self._liveness.raise_if_lost(peer)
                try:
                    yield outgoing.connection
                except BaseException:  # a message may be half sent or half read
                    with self._lock:
                        outgoing.close()
                    raise
        except PeerLostError:
            raise
        except OSError as error:
            if outgoing.replaced:
                raise PeerLostError(peer, "it has come back at another address") from error
            reason = self._liveness.reason(peer, BEAT_S) or f"its connection broke ({error.strerror or error})"
            self._lose(peer, reason)
            raise PeerLostError(peer, reason) from error

    def add_incoming(self, connection: Connection) -> bool:
        """Remember a connection that a peer has opened. If we have closed, close it and return False."""
        with self._lock:
            if not self._closed:
                self._incoming.add(connection)
                return True
        connection.socket.close()
        return False

    def remove_incoming(self, connection: Connection) -> None:
        """Close and forget a connection that a peer has opened."""
        with self._lock:
            self._incoming.discard(connection)
            connection.socket.close()

    def shut_down(self, peer: int | None = None) -> None:
        """Wake the threads that are blocked on connections with `peer`, or with any peer."""
        with self._lock:  # so that no thread closes a socket, and another one gets its file descriptor, in between
            for connection in self._all():
                if peer in (None, connection.peer.rank):
                    shut_down(connection.socket)

    def close(self, *, sockets: bool = True) -> None:
        """Accept no more connections; with `sockets`, close them all: no thread may use them any more."""
        with self._lock:
            self._closed = True
            for connection in self._all() if sockets else ():
                connection.socket.close()

    def _all(self) -> list[Connection]:
        outgoing = [each.connection for each in self._outgoing.values() if each.connection is not None]
        return [*outgoing, *self._incoming]


def shut_down(connection: socket.socket) -> None:
    """Wake every thread that is blocked on this socket."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
