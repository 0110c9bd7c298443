"""The failure detector: one thread that exchanges heartbeats with every peer, and reports peers that finish or are lost."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable
from enum import Enum

from roundelay import threads
from roundelay.transport.base import GAVE_UP, LEFT
from roundelay.transport.heartbeats import BEAT_S, NO_HEARTBEAT, Heartbeats

_BEAT, _FINISHED, _GOODBYE = b".", b"F", b"G"


class Event(Enum):
    """What the failure detector reports about a peer."""

    FINISHED = "finished"  # takes no more rounds of its own, but still answers
    LEFT = "left"  # said goodbye, after it had sent all that peers wait for
    SILENT = "silent"  # has missed some beats; it may be heard again
    HEARD = "heard"  # is not silent any more
    LOST = "lost"  # died, froze, was cut off, or gave up


class _HeartbeatConnection:
    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer, self.socket = peer, connection
        self.unparsed = b""  # the beginning of a message whose rest has not come yet


class FailureDetector:
    """Heartbeats over one connection per pair of learners.

    Args:
        report: called with (event, peer, reason) from the detector's thread.
    """

    def __init__(self, report: Callable[[Event, int, str], None]) -> None:
        self._report = report
        self._heartbeats = Heartbeats(time.monotonic)
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._added = threading.Condition(self._lock)
        self._known: set[int] = set()
        self._connections: dict[int, _HeartbeatConnection] = {}
        self._said: list[bytes] = []  # repeated on connections that are added later
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closing = False
        self._thread = threads.start("heartbeats", self._run)

    def add(self, peer: int, connection: socket.socket) -> None:
        """Exchange heartbeats with `peer` over this connection, which replaces an earlier one."""
        connection.setblocking(False)
        with self._lock:
            if self._closing:
                connection.close()
                return
            before = self._connections.get(peer)
            added = self._connections[peer] = _HeartbeatConnection(peer, connection)
            self._known.add(peer)
            self._heartbeats.heard(peer)
            for message in self._said:
                self._send(added, message)
            self._selector.register(connection, selectors.EVENT_READ, added)
            self._added.notify_all()
            self._waker.send(b"!")
        if before is not None:
            self._remove(before)

    def wait_for(self, peers: Iterable[int], timeout_s: float) -> int | None:
        """Wait until all of `peers` have connected once. Returns the lowest rank that has not in that time, or None."""
        wanted = set(peers)
        with self._lock:
            self._added.wait_for(lambda: wanted <= self._known, timeout_s)
            return min(wanted - self._known, default=None)

    def say_finished(self) -> None:
        """Tell all peers that we take no more rounds of our own."""
        self._say(_FINISHED)

    def give_up(self, peer: int, failure: str) -> None:
        """Tell one peer that it cannot count on us any more. Heartbeats go on until it closes the connection."""
        with self._lock:
            if peer in self._connections:
                self._send(self._connections[peer], _goodbye(failure))

    def close(self, failure: str = "") -> None:
        """Say goodbye, with the reason if it is a failure, and stop."""
        self._say(_goodbye(failure))
        with self._lock:
            self._closing = True
        self._waker.send(b"!")
        self._thread.join()
        for connection in list(self._connections.values()):
            self._remove(connection)
        self._selector.close()
        self._wake.close()
        self._waker.close()

    def _say(self, message: bytes) -> None:
        with self._lock:
            self._said.append(message)
            for connection in self._connections.values():
                self._send(connection, message)

    @staticmethod
    def _send(connection: _HeartbeatConnection, message: bytes) -> None:
        with contextlib.suppress(OSError):  # full (a frozen peer) or closed (a dead one): the reading side finds out
            connection.socket.send(message)

    def _run(self) -> None:
        due = 0.0
        while not self._closing:
            now = time.monotonic()
            if now >= due:
                due = now + BEAT_S
                self._beat()
            for key, _ in self._selector.select(timeout=max(due - now, 0.0)):
                if key.fileobj is self._wake:
                    self._wake.recv(64)
                else:
                    self._read(key.data)

    def _beat(self) -> None:
        with self._lock:
            connections = list(self._connections.values())
            for connection in connections:
                self._send(connection, _BEAT)
            lost, silent, heard = self._heartbeats.changes()
            events = [(Event.SILENT, peer) for peer in silent] + [(Event.HEARD, peer) for peer in heard]
        for event, peer in events:
            self._report(event, peer, "")
        for connection in connections:
            if connection.peer in lost and self._connections.get(connection.peer) is connection:
                self._lose(connection, f"{NO_HEARTBEAT}; it is frozen or cut off")

    def _read(self, connection: _HeartbeatConnection) -> None:
        try:
            data = self._received(connection)
        except OSError as error:
            self._lose(connection, f"its connection broke ({error.strerror})")
            return
        if data is None:
            return
        if not data:
            self._lose(connection, "its process ended")
            return
        self._heartbeats.heard(connection.peer)
        connection.unparsed += data
        self._parse(connection)

    def _received(self, connection: _HeartbeatConnection) -> bytes | None:
        """All that has come: empty at the end of the stream, None for nothing yet.

        It reads until the socket is empty, because TLS may hold decrypted bytes that the selector does not see.
        """
        data = b""
        with self._lock:  # no other thread may send on an encrypted connection at the same time
            while True:
                try:
                    piece = connection.socket.recv(65536)
                except (BlockingIOError, ssl.SSLWantReadError):
                    return data or None
                except OSError:
                    if data:  # maybe a goodbye before the connection broke: parse that first
                        return data
                    raise
                data += piece
                if not piece:
                    return data

    def _parse(self, connection: _HeartbeatConnection) -> None:
        while connection.unparsed:
            kind, rest = connection.unparsed[:1], connection.unparsed[1:]
            if kind == _GOODBYE:
                if len(rest) < 2 or len(rest) < 2 + (size := struct.unpack("!H", rest[:2])[0]):
                    return
                failure = rest[2 : 2 + size].decode(errors="replace")
                if not self._remove(connection):
                    return
                if failure:
                    self._report(Event.LOST, connection.peer, f"{GAVE_UP} ({failure})")
                else:
                    self._report(Event.LEFT, connection.peer, LEFT)
                return
            if kind == _FINISHED:
                self._report(Event.FINISHED, connection.peer, "")
            elif kind != _BEAT:
                self._lose(connection, "it sent what no learner sends")
                return
            connection.unparsed = rest

    def _lose(self, connection: _HeartbeatConnection, reason: str) -> None:
        if self._remove(connection):
            self._report(Event.LOST, connection.peer, reason)

    def _remove(self, connection: _HeartbeatConnection) -> bool:
        """Close a connection; False if the peer has come back on another one in the meantime."""
        with self._lock:
            current = self._connections.get(connection.peer) is connection
            if current:
                del self._connections[connection.peer]
                self._heartbeats.forget(connection.peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        return current


def _goodbye(failure: str) -> bytes:
    text = failure.encode()[:1000]
    return _GOODBYE + struct.pack("!H", len(text)) + text
