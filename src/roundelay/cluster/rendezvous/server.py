"""The rendezvous of a run as a server: one thread, which owns all sockets, around a `RendezvousState` that decides.

A server that was restarted rebuilds its state from what the learners tell it when they reconnect.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import time
from collections.abc import Callable

from roundelay import threads
from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.members import NEVER_FORMED
from roundelay.cluster.rendezvous.messages import MessageConnection
from roundelay.cluster.rendezvous.state import RendezvousState
from roundelay.errors import HandshakeError, LaunchError
from roundelay.transport.acceptor import Acceptor
from roundelay.transport.handshake import Hello
from roundelay.transport.heartbeats import BEAT_S
from roundelay.transport.refusals import Refusals
from roundelay.transport.security import Security

MESSAGE = "message"  # the reason under which bad messages are counted in `refused`
RENDEZVOUS = 0  # the rank of the rendezvous in handshakes


class _LearnerConnection(MessageConnection):
    """A connection whose `send` never raises, so its loss cannot interrupt the state. The next `receive` raises."""

    def flush(self) -> None:
        """Send the bytes that the socket did not take before, unless the connection is gone."""
        with contextlib.suppress(OSError):
            super().flush()


class RendezvousServer:
    """Serves a `RendezvousState` on a listening socket, from construction until `close`.

    Args:
        listener: the socket whose address the learners know.
        security: the secret that every connection must prove to know.
        state: decides what to reply. Only the server's thread changes it.
    """

    def __init__(self, listener: socket.socket, security: Security, state: RendezvousState) -> None:
        self._state = state
        self._selector = selectors.DefaultSelector()
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the server's thread
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._connections: set[MessageConnection] = set()
        self._closing = False
        self.refused = Refusals("the rendezvous")
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threads.start("rendezvous", self._run)
        self._acceptor = Acceptor(listener, security, self.refused, self._accepted, rank=RENDEZVOUS)

    @property
    def address(self) -> Address:
        """Where learners connect to."""
        return self._acceptor.address

    def died(self, learner: int | None, reason: str, process: str = "") -> None:
        """Report that the process of this learner, or with this name, has ended. May be called from any thread."""
        self._run_soon(lambda: self._state.died(learner, reason, process))

    def stop(self, reason: str) -> None:
        """Have all learners of the run save and stop. May be called from any thread, and from a signal handler."""
        self._run_soon(lambda: self._state.stop(reason))

    def waiting(self) -> str:
        """Which learners have come, and which have not; empty if none is missing, or if none has come."""
        return self._state.waiting()

    def living(self) -> list[int]:
        """Ids of the living learners."""
        return self._state.living

    def formed(self) -> bool:
        """Whether all learners that begin together have come."""
        return self._state.generation != NEVER_FORMED

    def close(self) -> None:
        """Close all connections and wait until the thread has ended."""
        self._closing = True
        self._acceptor.close()
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"!")

    def _run_soon(self, task: Callable[[], None]) -> None:
        """Have the server's thread call `task`."""
        self._tasks.put(task)
        self._wake()

    def _accepted(self, connection: socket.socket, _: Hello) -> None:
        """Called by the acceptor, in one of its threads."""
        if self._closing:
            connection.close()
        else:
            self._run_soon(lambda: self._add(_LearnerConnection(connection)))

    # The server's thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = time.monotonic() + BEAT_S
        while not self._closing:
            for key, _ in self._selector.select(timeout=max(due - time.monotonic(), 0.0)):
                if key.data is None:
                    self._wake_reader.recv(4096)
                else:
                    self._read(key.data)
            self._run_tasks()
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT_S
                self._state.tick()
                for connection in self._connections:  # also to a supervisor, which does not register
                    connection.send({"kind": "heartbeat"})
        self._run_tasks()  # connections accepted in the meantime are closed with the others
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _run_tasks(self) -> None:
        while not self._tasks.empty():
            self._tasks.get()()

    def _add(self, connection: MessageConnection) -> None:
        self._connections.add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _read(self, connection: MessageConnection) -> None:
        try:
            for message in connection.receive():
                self._state.handle(connection, message)
        except HandshakeError as error:
            self.refused.count(MESSAGE, f"a message, and closed its connection ({error})")
            self._drop(connection)
        except OSError:
            self._drop(connection)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            self.refused.count(MESSAGE, f"a message with wrong fields, and closed its connection ({error!r})")
            self._drop(connection)

    def _drop(self, connection: MessageConnection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()
        self._state.closed(connection)


def open_listener(host: str, port: int = 0) -> socket.socket:
    """A listening socket. Raises LaunchError if the interface or the port cannot be used."""
    if not 0 <= port <= 65535:  # create_server would raise OverflowError, and leave its socket open
        raise LaunchError(f"cannot listen on {host}:{port}: a port is a number from 0 to 65535")
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror}; name another interface or port") from None
