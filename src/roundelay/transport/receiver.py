"""What comes from others: payloads, received or mapped and counted, and calls, answered one at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from roundelay.errors import HandshakeError, RefusedError
from roundelay.transport.base import Handler, Transport, Undo
from roundelay.transport.framing import Connection, Header, Kind

STALL_S = 1.0  # how long callers wait for the one before them, who may be frozen in the middle of its request


class _Place:
    """Where requests are received: one at a time, so that one buffer is enough."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def of_size(self, nbytes: int) -> Tensor:
        if self.buffer.nbytes < nbytes:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self.buffer[:nbytes]


class Receiver:
    """Receives for a transport, in the threads that serve its connections.

    Args:
        owner: whose traffic, refusals and layout these are.
        fail: takes what a handler raises to the training thread.
        share_memory: whether peers of this machine may have us read and write theirs.
    """

    def __init__(self, owner: Transport, fail: Callable[[BaseException], None], *, share_memory: bool) -> None:
        self._owner, self._fail, self._share_memory = owner, fail, share_memory
        self._handler: Handler | None = None
        self._undo: Undo | None = None
        self._serving = threading.Event()
        self._served = threading.Condition()
        self._in_service = 0
        self._slot = threading.Lock()  # one handler at a time
        self._place = _Place()
        self._replacing = threading.Lock()

    def receive(self, channel: Connection, buffer: Tensor, header: Header) -> None:
        """The payload that a header has announced."""
        try:
            channel.receive_into(buffer, header)
        except RefusedError as error:
            self._owner.refused.count(error.reason, f"a message of learner {channel.peer.rank}")
            raise
        self._owner.traffic.received(buffer.nbytes)

    def mapped(self, channel: Connection, fd: int, nbytes: int) -> Tensor:
        """The payload that lies in memory of a peer."""
        if not self._share_memory:
            raise HandshakeError("the other end says that its weights are in memory that we do not share")
        return channel.memory.map(fd, nbytes)

    def is_other_layout(self, header: Header) -> bool:
        """Whether a message is of weights that are laid out otherwise than ours."""
        return bool(header.layout and self._owner.layout and header.layout != self._owner.layout)

    def serve(self, handler: Handler | None, undo: Undo | None = None) -> None:
        """Answer calls with `handler`; None refuses them from now on, and waits for those under way."""
        with self._served:
            self._handler, self._undo = handler, undo
            self._served.wait_for(lambda: handler is not None or not self._in_service)
        self._serving.set()

    def answer(self, channel: Connection, header: Header) -> None:
        """Answer the call that a header begins; it waits until calls are served, or refused, at all."""
        self._serving.wait()
        with self._request(channel, header) as buffers:
            if buffers is not None:
                self._handle(channel, header, *buffers)

    @contextlib.contextmanager
    def _request(self, channel: Connection, header: Header) -> Iterator[tuple[Tensor, Tensor] | None]:
        """The request, and where the reply goes: the caller's own memory, or our one request buffer; None if it is refused.

        If the caller who has that buffer is frozen, the next one does not wait for long: there is a new one from then on.
        """
        if header.shared_fd >= 0:
            reply = self.mapped(channel, header.shared_fd, header.nbytes)
            source_fd = header.source_fd
            yield (reply if source_fd < 0 else self.mapped(channel, source_fd, header.nbytes)), reply
            return
        while not (place := self._place).lock.acquire(timeout=STALL_S):
            with self._replacing:
                if self._place is place:
                    self._place = _Place()
        try:
            request = place.of_size(header.nbytes)
            try:
                self.receive(channel, request, header)
            except RefusedError as error:
                channel.refuse(error.reason)
                yield None
                return
            yield request, request
        finally:
            place.lock.release()

    def _handle(self, channel: Connection, header: Header, request: Tensor, reply: Tensor) -> None:
        peer = channel.peer.rank
        with self._in_service_now() as (handler, undo):
            if handler is None:
                channel.send(Header(Kind.RETIRED, 0))
                return
            try:
                if self.is_other_layout(header):
                    raise RefusedError(peer, "another model")
                with self._slot:
                    handler(peer, request, reply)
            except RefusedError as error:
                self._owner.refused.count(error.reason, f"a call of learner {peer}")
                channel.refuse(error.reason)
                return
            except BaseException as error:
                self._fail(error)  # here, for an OSError of the handler is no broken connection
                raise ConnectionAbortedError("the handler failed") from error
            try:
                answer = Header(Kind.REPLY, header.nbytes, shared_fd=header.shared_fd)
                self._owner.traffic.sent(peer, channel.send(answer, reply if header.shared_fd < 0 else None))
            except OSError:
                if undo:
                    undo(peer, reply)
                raise

    @contextlib.contextmanager
    def _in_service_now(self) -> Iterator[tuple[Handler | None, Undo | None]]:
        """The handlers of one call, for whose end, with its reply, `serve(None)` waits."""
        with self._served:
            self._in_service += 1
            handlers = self._handler, self._undo
        try:
            yield handlers
        finally:
            with self._served:
                self._in_service -= 1
                self._served.notify_all()
