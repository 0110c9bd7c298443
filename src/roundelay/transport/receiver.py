"""What peers ask of one learner: calls, swaps and state. Each incoming connection is served by its own thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from roundelay.errors import HandshakeError, RefusedError, StrategyError
from roundelay.threads import yield_to_computation
from roundelay.transport.base import Handler, Transport, Undo
from roundelay.transport.framing import Connection, Header, Kind
from roundelay.transport.swaps import Swaps

STALL_S = 1.0  # how long a call waits for the request buffer, whose user may be frozen in the middle of a request
HEADER = "header"


class _RequestBuffer:
    """Where requests that come over TCP are received: one at a time, so one buffer is enough."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of_size(self, nbytes: int) -> Tensor:
        if self._memory.nbytes < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes]


class Receiver:
    """Serves the requests of peers.

    Args:
        owner: its traffic and refusals are counted, and its layout is checked.
        swaps: which swaps we take part in.
        share_memory: whether peers of this machine may have us read and write their memory.
    """

    def __init__(self, owner: Transport, swaps: Swaps, *, share_memory: bool) -> None:
        self._owner, self._swaps, self._share_memory = owner, swaps, share_memory
        self._handler: Handler | None = None
        self._undo: Undo | None = None
        self._ready = threading.Event()  # set once calls are answered or refused
        self._calls_changed = threading.Condition()
        self._calls = 0
        self._one_handler = threading.Lock()
        self._request_buffer = _RequestBuffer()
        self._replacing = threading.Lock()
        self._state: Callable[[], Tensor] | None = None
        self._offering = threading.Event()  # set once there is a state, or at the end

    def set_handler(self, handler: Handler | None, undo: Undo | None = None) -> None:
        """Answer calls with `handler`; None refuses them from now on, and waits for the calls under way."""
        with self._calls_changed:
            self._handler, self._undo = handler, undo
            self._calls_changed.wait_for(lambda: handler is not None or not self._calls)
        self._ready.set()

    def offer(self, state: Callable[[], Tensor]) -> None:
        """Give `state()` to learners that fetch it."""
        self._state = state
        self._offering.set()

    def close(self) -> None:
        """Refuse calls, and keep no thread waiting."""
        self.set_handler(None)
        self._state = None
        self._offering.set()

    def serve(self, connection: Connection) -> None:
        """Serve one connection until it ends. What goes wrong in a handler is raised in the training thread."""
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
            self._answer_call(connection, header)
        else:
            raise HandshakeError(f"the other end sent {header.kind.name} without being asked")

    # Swaps and state -----------------------------------------------------------------------------------------------

    def _take_swap(self, connection: Connection, header: Header) -> None:
        """Wait until we reach that round ourselves; meanwhile the payload waits in the socket or in the peer's memory."""
        peer = connection.peer.rank
        target = self._swaps.target(header.round, peer)
        if target is not None and (target.nbytes != header.nbytes or self._is_other_layout(header)):
            raise StrategyError(
                f"learner {peer} swaps weights of another model with us ({header.nbytes} bytes, ours are {target.nbytes}); "
                "build the same model everywhere"
            )
        buffer = torch.empty(header.nbytes, dtype=torch.uint8) if target is None else target
        try:
            if header.shared_fd >= 0:
                buffer.copy_(self._mapped(connection, header.shared_fd, header.nbytes))
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
        with self._failing_training():
            state = offered()
        sent = connection.send(Header(Kind.STATE, state.nbytes), state)
        self._owner.traffic.sent(connection.peer.rank, sent)

    # Calls ---------------------------------------------------------------------------------------------------------

    def _answer_call(self, connection: Connection, header: Header) -> None:
        self._ready.wait()
        with self._request(connection, header) as buffers:
            if buffers is not None:
                self._handle(connection, header, *buffers)

    @contextlib.contextmanager
    def _request(self, connection: Connection, header: Header) -> Iterator[tuple[Tensor, Tensor] | None]:
        """The request, and where the reply goes; None if the request was refused.

        Both are memory of the caller, or our one request buffer. If the user of that buffer is frozen, the next call
        replaces it and does not wait any longer.
        """
        if header.shared_fd >= 0:
            reply = self._mapped(connection, header.shared_fd, header.nbytes)
            fd = header.request_fd
            yield (reply if fd < 0 else self._mapped(connection, fd, header.nbytes)), reply
            return
        while not (buffer := self._request_buffer).lock.acquire(timeout=STALL_S):
            with self._replacing:
                if self._request_buffer is buffer:
                    self._request_buffer = _RequestBuffer()
        try:
            request = buffer.of_size(header.nbytes)
            try:
                receive_payload(self._owner, connection, request, header)
            except RefusedError as error:
                connection.refuse(error.reason)
                yield None
                return
            yield request, request
        finally:
            buffer.lock.release()

    def _handle(self, connection: Connection, header: Header, request: Tensor, reply: Tensor) -> None:
        peer = connection.peer.rank
        with self._counted_call() as (handler, undo):
            if handler is None:
                connection.send(Header(Kind.NO_CALLS, 0))
                return
            try:
                if self._is_other_layout(header):
                    raise RefusedError(peer, "another model")
                with self._one_handler, self._failing_training():
                    handler(peer, request, reply)
            except RefusedError as error:
                self._owner.refused.count(error.reason, f"a call of learner {peer}")
                connection.refuse(error.reason)
                return
            try:
                answer = Header(Kind.REPLY, header.nbytes, shared_fd=header.shared_fd)
                sent = connection.send(answer, reply if header.shared_fd < 0 else None)
                self._owner.traffic.sent(peer, sent)
            except OSError:
                if undo:
                    undo(peer, reply)
                raise

    @contextlib.contextmanager
    def _failing_training(self) -> Iterator[None]:
        """Have the training thread raise what goes wrong in this block, and end the connection.

        Here and not in `serve`, because an OSError in this block is no broken connection. RefusedError passes.
        """
        try:
            yield
        except RefusedError:
            raise
        except BaseException as error:
            self._owner.fail(error)
            raise ConnectionAbortedError("this learner has failed") from error

    @contextlib.contextmanager
    def _counted_call(self) -> Iterator[tuple[Handler | None, Undo | None]]:
        """The handlers of one call; `set_handler(None)` waits for the end of this block."""
        with self._calls_changed:
            self._calls += 1
            handlers = self._handler, self._undo
        try:
            yield handlers
        finally:
            with self._calls_changed:
                self._calls -= 1
                self._calls_changed.notify_all()

    def _mapped(self, connection: Connection, fd: int, nbytes: int) -> Tensor:
        if not self._share_memory:
            raise HandshakeError("the other end says that its weights are in memory that we do not share")
        return connection.memory.map(fd, nbytes)

    def _is_other_layout(self, header: Header) -> bool:
        return bool(header.layout and self._owner.layout and header.layout != self._owner.layout)


def receive_payload(owner: Transport, connection: Connection, buffer: Tensor, header: Header) -> None:
    """Receive what a header has announced, and count it. Raises RefusedError if it was altered on the way."""
    try:
        connection.receive_into(buffer, header)
    except RefusedError as error:
        owner.refused.count(error.reason, f"a message of learner {connection.peer.rank}")
        raise
    owner.traffic.received(buffer.nbytes)
