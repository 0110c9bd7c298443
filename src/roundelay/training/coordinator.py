"""What learners of a run must agree on beyond their weights: the budget, the data cursor, and where to stop.

One small server, in the supervisor or (under torchrun) in learner 0. Requests are a few bytes over the same authenticated
handshake as exchanges; a group's k-th draw has one answer, whichever member asks and however often.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence

from roundelay.transport import wire
from roundelay.transport.security import Security
from roundelay.transport.wire import Hello, Purpose

_REQUEST = struct.Struct("!cqq")
_ANSWER = struct.Struct("!q")
_BEGIN, _DRAW, _STOP, _MARK = b"B", b"D", b"S", b"M"
_NOTHING = -1


class Cursor:
    """Numbers below `total`, each given once; those that were `used` before are not given again.

    >>> cursor = Cursor(total=4, used=[1])
    >>> cursor.draw(0, 0), cursor.draw(1, 0), cursor.draw(0, 0), cursor.draw(1, 1), cursor.draw(0, 1)
    (0, 2, 0, 3, None)
    """

    def __init__(self, total: int, used: Iterable[int] = ()) -> None:
        self._used = set(used)
        self._total, self._next = total, 0
        self._drawn: defaultdict[int, list[int | None]] = defaultdict(list)

    def draw(self, group: int, index: int) -> int | None:
        """What `group` gets as its draw number `index`; None when all is given."""
        drawn = self._drawn[group]
        if index == len(drawn):
            drawn.append(self._advance())
        return drawn[index]

    @property
    def given(self) -> int:
        """All below were given or used."""
        return self._next

    def _advance(self) -> int | None:
        while self._next in self._used:
            self._used.discard(self._next)
            self._next += 1
        if self._next >= self._total:
            return None
        self._next += 1
        return self._next - 1


class CoordinatorServer:
    """Serves draws, and finds the last step of learners that take their steps together and were asked to stop.

    Args:
        listener: whose address learners know.
        security: what they must prove to know.
        parties: of every learner, the number of its party: those which must end with the same step.
    """

    def __init__(self, listener: socket.socket, security: Security, parties: Sequence[int]) -> None:
        self._listener, self._security = listener, security
        self._cursor: Cursor | None = None
        self._parties = list(parties)
        self._changed = threading.Condition()
        self._present = set(range(len(parties)))
        self._begun: dict[int, int] = {}
        self._stopped_at: int | None = None
        threading.Thread(target=self._accept, name="roundelay-coordinator", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="roundelay-draws", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection, hello = wire.accept(connection, 0, bytes(16), self._security)
            peer = hello.rank
            if not 0 <= peer < len(self._parties):
                return
            try:
                while True:
                    kind, first, second = _REQUEST.unpack(_receive(connection, _REQUEST.size))
                    if kind == _BEGIN:
                        answer = self._begin(first, _receive(connection, second))
                    elif kind == _DRAW:
                        answer = self._draw(first, second)
                    else:
                        answer = self._last_step(peer, first) if kind == _STOP else self._mark()
                    connection.sendall(_ANSWER.pack(answer))
            finally:
                with self._changed:  # whoever has gone stops nobody from stopping
                    self._present.discard(peer)
                    self._changed.notify_all()

    def _begin(self, total: int, used: bytes) -> int:
        with self._changed:
            if self._cursor is None:  # all learners say the same
                self._cursor = Cursor(total, array("q", used))
        return total

    def _draw(self, group: int, index: int) -> int:
        with self._changed:
            assert self._cursor is not None, "a learner begins before it draws"
            number = self._cursor.draw(group, index)
        return _NOTHING if number is None else number

    def _mark(self) -> int:
        with self._changed:
            if self._stopped_at is None:
                self._stopped_at = self._cursor.given if self._cursor else 0
            return self._stopped_at

    def _last_step(self, learner: int, begun: int) -> int:
        """The furthest step that anybody has begun: all can finish it, for nobody has gone past."""
        party = {other for other, number in enumerate(self._parties) if number == self._parties[learner]}
        with self._changed:
            self._begun[learner] = begun
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._begun.keys() >= party & self._present)
            return max(self._begun[member] for member in party & self._begun.keys())

    def close(self) -> None:
        """Accept nobody any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Coordinator:
    """A learner's line to the server."""

    def __init__(self, address: tuple[str, int], rank: int, security: Security) -> None:
        self._connection, _ = wire.connect(address, Hello(rank, Purpose.RENDEZVOUS, 0, bytes(16)), 0, security)
        self._lock = threading.Lock()

    def begin(self, total: int, used: Sequence[int]) -> None:
        """Say what the budget is, and which numbers of it an earlier part of this run has used."""
        packed = array("q", used).tobytes()
        self._ask(_BEGIN, total, len(packed), packed)

    def draw(self, group: int, index: int) -> int | None:
        """The number that counts the budget for this step; None when it is used up."""
        number = self._ask(_DRAW, group, index)
        return None if number == _NOTHING else number

    def last_step(self, begun: int) -> int:
        """Having begun so many steps, how many to end with; waits until all of the same party have said how many they have."""
        return self._ask(_STOP, begun, 0)

    def mark(self) -> int:
        """Where the budget stood when the first learner asked this: one name for what all save when they stop."""
        return self._ask(_MARK, 0, 0)

    def _ask(self, kind: bytes, first: int, second: int, more: bytes = b"") -> int:
        with self._lock:
            self._connection.sendall(_REQUEST.pack(kind, first, second) + more)
            (answer,) = _ANSWER.unpack(_receive(self._connection, _ANSWER.size))
        return int(answer)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        if not piece:
            raise ConnectionError("the coordinator has gone")
        data += piece
    return data
