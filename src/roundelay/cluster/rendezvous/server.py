"""The rendezvous of a run as a server: one thread, which owns its sockets, around a desk that decides.

One that was started again is rebuilt from what the learners tell it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable

from roundelay.cluster.rendezvous.messages import MessageLine
from roundelay.cluster.rendezvous.state import Address, RendezvousState
from roundelay.errors import HandshakeError, LaunchError
from roundelay.transport.acceptor import Acceptor
from roundelay.transport.handshake import Hello
from roundelay.transport.heartbeats import BEAT_S
from roundelay.transport.refusals import Refusals
from roundelay.transport.security import Security

log = logging.getLogger("roundelay")

MESSAGE = "message"
RENDEZVOUS = 0  # the number it has in handshakes


class RendezvousServer:
    """A desk behind a listening socket.

    Args:
        listener: whose address learners know.
        security: what they must prove to know.
        desk: decides; used by the server's thread only.
    """

    def __init__(self, listener: socket.socket, security: Security, desk: RendezvousState) -> None:
        self._desk = desk
        self._selector = selectors.DefaultSelector()
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._lines: set[MessageLine] = set()
        self._closing = False
        self.refused = Refusals("the rendezvous")
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="roundelay-rendezvous", daemon=True)
        self._thread.start()
        self._gate = Acceptor(listener, security, self.refused, self._welcome, rank=RENDEZVOUS)

    @property
    def address(self) -> Address:
        """Where learners find it."""
        return self._gate.address

    def died(self, learner: int, reason: str) -> None:
        """Somebody who knows says that this learner's process has ended."""
        self._do(lambda: self._desk.died(learner, reason))

    def living(self) -> list[int]:
        """Who takes part now."""
        return self._desk.living

    def close(self) -> None:
        """Serve nobody any more."""
        self._closing = True
        self._gate.close()
        with contextlib.suppress(OSError):
            self._waker.send(b"!")
        self._thread.join()

    # Threads ---------------------------------------------------------------------------------------------------------------

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def _welcome(self, connection: socket.socket, _: Hello) -> None:
        if self._closing:
            connection.close()
        else:
            self._do(lambda: self._add(MessageLine(connection)))

    def _add(self, line: MessageLine) -> None:
        self._lines.add(line)
        self._selector.register(line.connection, selectors.EVENT_READ, line)

    def _run(self) -> None:
        due = time.monotonic() + BEAT_S
        while not self._closing:
            for key, _ in self._selector.select(timeout=max(due - time.monotonic(), 0.0)):
                if key.data is None:
                    self._wake.recv(4096)
                else:
                    self._read(key.data)
            while not self._tasks.empty():
                self._tasks.get()()
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT_S
                self._guarded(self._desk.tick)
                for line in list(self._lines):
                    self._guarded(line.flush)
        while not self._tasks.empty():  # connections that have just come are closed with the others
            self._tasks.get()()
        for line in list(self._lines):
            self._drop(line)
        self._selector.close()
        self._wake.close()
        self._waker.close()

    def _read(self, line: MessageLine) -> None:
        try:
            for message in line.receive():
                self._desk.handle(line, message)
        except HandshakeError as error:
            self.refused.count(MESSAGE, f"a message, and closed its connection ({error})")
            self._drop(line)
        except OSError:
            self._drop(line)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            self.refused.count(MESSAGE, f"what no learner sends, and closed its connection ({error!r})")
            self._drop(line)

    def _guarded(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):  # a line that is gone will be read as such
            work()

    def _drop(self, line: MessageLine) -> None:
        self._lines.discard(line)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
        line.close()
        self._desk.closed(line)


def open_listener(host: str, port: int = 0) -> socket.socket:
    """A listening socket. Raises LaunchError, in one line, if that cannot be."""
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror}; name another interface or port") from None
