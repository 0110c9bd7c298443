"""The watch: one thread that keeps heartbeats with every peer, and knows who lives, has finished or is gone."""

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

from roundelay.transport.base import GAVE_UP, LEFT
from roundelay.transport.heartbeats import BEAT_S, SILENT, Heartbeats

_BEAT, _FINISHED, _GOODBYE = b".", b"F", b"G"


class Event(Enum):
    """What the watch has to tell about a peer."""

    FINISHED = "finished"  # takes no more rounds of its own, but still answers
    LEFT = "left"  # said goodbye: what it still owed has been sent
    QUIET = "quiet"  # has missed some beats; it may be heard again
    HEARD = "heard"  # is not quiet any more
    LOST = "lost"  # died, froze, was cut off, or gave up


class _Line:
    """A watch connection and what has come in but is no whole message yet."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer, self.connection = peer, connection
        self.pending = b""


class FailureDetector:
    """Heartbeats over one connection per pair of learners.

    `tell(event, peer, reason)` is called from the watch's thread.
    """

    def __init__(self, tell: Callable[[Event, int, str], None]) -> None:
        self._tell = tell
        self._pulse = Heartbeats(time.monotonic)
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._added = threading.Condition(self._lock)
        self._known: set[int] = set()
        self._quiet: set[int] = set()
        self._lines: dict[int, _Line] = {}
        self._said: list[bytes] = []  # what a line that comes later must hear too
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="roundelay-watch", daemon=True)
        self._thread.start()

    def add(self, peer: int, connection: socket.socket) -> None:
        """Keep heartbeats with `peer` over this connection."""
        connection.setblocking(False)
        with self._lock:
            if self._closing:
                connection.close()
                return
            line = self._lines[peer] = _Line(peer, connection)
            self._known.add(peer)
            self._pulse.heard(peer)
            for message in self._said:
                self._send(line, message)
            self._selector.register(connection, selectors.EVENT_READ, line)
            self._added.notify_all()
            self._waker.send(b"!")

    def wait_for(self, peers: Iterable[int], timeout_s: float) -> int | None:
        """Until all of `peers` have a line, or had one; the first that has none after that time."""
        wanted = set(peers)
        with self._lock:
            self._added.wait_for(lambda: wanted <= self._known, timeout_s)
            return min(wanted - self._known, default=None)

    def finished(self) -> None:
        """Tell everyone that we take no more rounds of our own."""
        self._say(_FINISHED)

    def close(self, failure: str = "") -> None:
        """Say goodbye, with the reason if it is a bad one, and stop."""
        text = failure.encode()[:1000]
        self._say(_GOODBYE + struct.pack("!H", len(text)) + text)
        with self._lock:
            self._closing = True
        self._waker.send(b"!")
        self._thread.join()
        for line in list(self._lines.values()):
            self._drop(line)
        self._selector.close()
        self._wake.close()
        self._waker.close()

    def _say(self, message: bytes) -> None:
        with self._lock:
            self._said.append(message)
            for line in self._lines.values():
                self._send(line, message)

    @staticmethod
    def _send(line: _Line, message: bytes) -> None:
        with contextlib.suppress(OSError):  # full (a frozen peer) or closed (a dead one): the reading side finds out
            line.connection.send(message)

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
            lines = list(self._lines.values())
            for line in lines:
                self._send(line, _BEAT)
            silent = set(self._pulse.silent())
            quiet = self._pulse.quiet() - silent
            news = [(Event.QUIET, peer) for peer in quiet - self._quiet]
            news += [(Event.HEARD, peer) for peer in self._quiet - quiet if peer in self._lines]
            self._quiet = quiet
        for event, peer in news:
            self._tell(event, peer, "")
        for line in lines:
            if line.peer in silent and self._lines.get(line.peer) is line:
                self._lose(line, f"{SILENT}; it is frozen or cut off")

    def _read(self, line: _Line) -> None:
        try:
            data = self._received(line)
        except OSError as error:
            self._lose(line, f"its connection broke ({error.strerror})")
            return
        if data is None:
            return
        if not data:
            self._lose(line, "its process ended")
            return
        self._pulse.heard(line.peer)
        line.pending += data
        self._parse(line)

    def _received(self, line: _Line) -> bytes | None:
        """All that has come, empty at the end, None for nothing yet. TLS may have decrypted more than the selector sees."""
        data = b""
        with self._lock:  # no other thread may send on an encrypted connection at the same time
            while True:
                try:
                    piece = line.connection.recv(65536)
                except (BlockingIOError, ssl.SSLWantReadError):
                    return data or None
                except OSError:
                    if data:  # perhaps a goodbye, before the connection broke: that is looked at first
                        return data
                    raise
                data += piece
                if not piece:
                    return data

    def _parse(self, line: _Line) -> None:
        while line.pending:
            kind, rest = line.pending[:1], line.pending[1:]
            if kind == _GOODBYE:
                if len(rest) < 2 or len(rest) < 2 + (size := struct.unpack("!H", rest[:2])[0]):
                    return
                failure = rest[2 : 2 + size].decode(errors="replace")
                if not self._drop(line):
                    return
                if failure:
                    self._tell(Event.LOST, line.peer, f"{GAVE_UP} ({failure})")
                else:
                    self._tell(Event.LEFT, line.peer, LEFT)
                return
            if kind == _FINISHED:
                self._tell(Event.FINISHED, line.peer, "")
            elif kind != _BEAT:
                self._lose(line, "it sent what no learner sends")
                return
            line.pending = rest

    def _lose(self, line: _Line, reason: str) -> None:
        if self._drop(line):
            self._tell(Event.LOST, line.peer, reason)

    def _drop(self, line: _Line) -> bool:
        """False if this was no longer the line to that peer, which has come back on another."""
        with self._lock:
            current = self._lines.get(line.peer) is line
            if current:
                del self._lines[line.peer]
                self._pulse.forget(line.peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
        line.connection.close()
        return current
