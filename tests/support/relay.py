"""A relay between learners that alters or cuts what passes, at a known place in the stream."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from roundelay.transport import handshake
from roundelay.transport.tcp import TcpTransport

Alter = Callable[[bool, int, bytes], bytes]
_OUTWARD = handshake._CALL.size + handshake._PROOF_BYTES
_INWARD = len(handshake.MAGIC) + handshake._NONCE_BYTES + handshake._ANSWER.size + handshake._PROOF_BYTES


class CutError(OSError):
    """Ends both directions of a relayed connection, after these last bytes."""

    def __init__(self, last: bytes) -> None:
        super().__init__("cut")
        self.last = last


class Relay:
    """Passes bytes on between callers and a learner. `alter(outward, start, data)` may change them.

    `outward` is true on the way to the learner. `start` counts bytes of that direction since the handshake.
    """

    def __init__(self, target: tuple[str, int], alter: Alter = lambda outward, start, data: data) -> None:
        self._target, self._alter = target, alter
        self.recorded = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            while True:
                caller, _ = self._listener.accept()
                answerer = socket.create_connection(self._target)
                for source, target in ((caller, answerer), (answerer, caller)):
                    arguments = (source, target, source is caller)
                    threading.Thread(target=self._pass, args=arguments, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, outward: bool) -> None:
        start = -(_OUTWARD if outward else _INWARD)
        with source:
            try:
                while data := source.recv(65536):
                    if outward:
                        self.recorded += data
                    target.sendall(self._alter(outward, start, data))
                    start += len(data)
            except CutError as cut:
                target.sendall(cut.last)
            except OSError:
                pass
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)


class Flip:
    """Changes the byte at `position` of one direction, on the first connection only."""

    def __init__(self, position: int, *, outward: bool) -> None:
        self.outward, self.position, self.done = outward, position, False

    def __call__(self, outward: bool, start: int, data: bytes) -> bytes:
        at = self.position - start
        if outward != self.outward or not 0 <= at < len(data) or self.done:
            return data
        self.done = True
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


class Cut:
    """Cuts the connection once `position` bytes of one direction have passed."""

    def __init__(self, position: int, *, outward: bool) -> None:
        self.outward, self.position = outward, position

    def __call__(self, outward: bool, start: int, data: bytes) -> bytes:
        if outward == self.outward and start + len(data) > self.position:
            raise CutError(data[: max(self.position - start, 0)])
        return data


def behind(transport: TcpTransport, peer: int, alter: Alter) -> None:
    """Have `transport` reach `peer` through a relay from now on."""
    transport._connections._addresses[peer] = Relay(transport._connections._addresses[peer], alter).address
