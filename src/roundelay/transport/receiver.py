"""What peers ask of one learner: calls, swaps and state. Each incoming connection is served by its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from roundelay.errors import HandshakeError, RefusedError, StrategyError
from roundelay.threads import yield_to_computation
from roundelay.transport.base import Transport
from roundelay.transport.call_server import CallServer
from roundelay.transport.framing import Connection, Header, Kind
from roundelay.transport.reporting import failing_training, receive_payload
from roundelay.transport.swaps import Swaps

HEADER = "header"


class Receiver:
    """Serves the requests of peers.

    Args:
        owner: its traffic and refusals are counted, and its layout is checked.
        swaps: which swaps we take part in.
        calls: serves calls.
    """

    def __init__(self, owner: Transport, swaps: Swaps, calls: CallServer) -> None:
        self._owner, self._swaps, self._calls = owner, swaps, calls
        self._state: Callable[[], Tensor] | None = None
        self._offering = threading.Event()  # set once there is a state, or at the end

    def offer(self, state: Callable[[], Tensor]) -> None:
        """Give `state()` to learners that fetch it."""
        self._state = state
        self._offering.set()

    def close(self) -> None:
        """Keep no thread waiting."""
        self._state = None
        self._offering.set()

    def serve(self, connection: Connection) -> None:
        """Serve one connection until it ends. What goes wrong in an exchange is raised in the training thread."""
        yield_to_computation()
        try:
            while True:
                self._serve_one(connection)
        except HandshakeError as error:
            what = f"a message of learner {connection.peer.rank}, and closed its connection ({error})"
            self._owner.refused.count(HEADER, what)
        except OSError:
            pass  # the peer has left or was given up; the failure detector reports it
        except BaseException as error:
            self._owner.fail(error)

    def _serve_one(self, connection: Connection) -> None:
        header = connection.receive()
        if header.kind == Kind.SWAP:
            self._take_swap(connection, header)
        elif header.kind == Kind.STATE:
            self._give_state(connection)
        elif header.kind == Kind.CALL:
            self._calls.answer(connection, header)
        else:
            raise HandshakeError(f"the other end sent {header.kind.name} without being asked")

    def _take_swap(self, connection: Connection, header: Header) -> None:
        """Wait until we reach that round ourselves; meanwhile the payload waits in the socket or in the peer's memory."""
        peer = connection.peer.rank
        target = self._swaps.target(header.round, peer)
        if target is not None and (target.nbytes != header.nbytes or header.is_other_layout(self._owner.layout)):
            raise StrategyError(
                f"learner {peer} swaps weights of another model with us ({header.nbytes} bytes, ours are {target.nbytes}); "
                "build the same model everywhere"
            )
        buffer = torch.empty(header.nbytes, dtype=torch.uint8) if target is None else target
        try:
            if header.shared >= 0:
                buffer.copy_(connection.memory.map(header.shared, header.nbytes))
            else:
                receive_payload(self._owner, connection, buffer, header)
        except RefusedError as error:
            if target is not None:
                connection.refuse(error.reason)
                return
        connection.send(Header(Kind.RECEIVED, 0))
        self._swaps.received(header.round, peer)

    def _give_state(self, connection: Connection) -> None:
        self._offering.wait()
        if (offered := self._state) is None:
            raise ConnectionAbortedError("this learner has closed")
        with failing_training(self._owner):
            state = offered()
        sent = connection.send(Header(Kind.STATE, state.nbytes), state)
        self._owner.traffic.sent(connection.peer.rank, sent)
