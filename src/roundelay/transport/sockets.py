"""Calls and swaps over TCP, or through shared memory between learners of one machine; see `watch` for heartbeats.

One connection per ordered pair, a *lane*: the side that connected sends requests on it and reads their answers, so that two
learners which call each other at the same time never mix up bytes. All waiting happens in threads blocked in the kernel; when
the watch gives a peer up, its lanes are shut down and those threads wake with an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor

import torch
from torch import Tensor

from roundelay.errors import HandshakeError, PeerLostError
from roundelay.transport import shared, wire
from roundelay.transport.base import Collectives, Handler, Transport
from roundelay.transport.swaps import SwapBoard
from roundelay.transport.watch import Event, Watch
from roundelay.transport.wire import Header, Hello, Kind, Purpose

log = logging.getLogger("roundelay")

Address = tuple[str, int]


class _Lane:
    """Our requests to one peer."""

    def __init__(self, connection: socket.socket, peer: Hello) -> None:
        self.connection, self.peer = connection, peer
        self.lock = threading.Lock()


class SocketTransport(Transport):
    """A learner's listening socket, its lanes to peers, and the watch.

    Args:
        rank: this learner.
        size: how many there are.
        listener: a socket that peers know the address of.
        secret: what every connection must prove to know.
        collectives: sums and broadcasts, which run elsewhere.
        share_memory: let learners of this machine exchange through shared memory.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        listener: socket.socket,
        secret: bytes,
        collectives: Collectives,
        *,
        share_memory: bool = True,
    ) -> None:
        super().__init__(rank, size)
        self._listener, self._secret, self._collectives = listener, secret, collectives
        self._host = wire.this_host()
        self._memory = shared.SharedMemory() if share_memory and shared.available() else None
        self._addresses: dict[int, Address] = {}
        self._lanes: dict[int, _Lane] = {}
        self._accepted: dict[int, list[socket.socket]] = {}
        self._state = threading.RLock()
        self._lost: dict[int, str] = {}
        self._dependents: list[tuple[tuple[int, ...], Future[None]]] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._swaps = SwapBoard(self._send_final)
        self._handler: Handler | None = None
        self._undo: Handler | None = None
        self._serving = threading.Event()
        self._slot = threading.Lock()  # one call is served at a time: one request buffer is enough
        self._request = torch.empty(0, dtype=torch.uint8)
        self._callers = ThreadPoolExecutor(max_workers=max(2, min(size, 32)), thread_name_prefix="roundelay-call")
        self._watch = Watch(self._noticed)
        threading.Thread(target=self._accept, name="roundelay-accept", daemon=True).start()

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Learn where the peers are, and open a watch connection to each of higher rank; the others come to us."""
        self._addresses = dict(addresses)
        for peer, address in self._addresses.items():
            if peer > self.rank:
                hello = Hello(self.rank, Purpose.WATCH, os.getpid(), self._host)
                connection, _ = wire.connect(address, hello, peer, self._secret)
                self._watch.add(peer, connection)

    def allocate(self, nbytes: int) -> Tensor:
        """Shared memory where that can be used, pinned where there is a GPU."""
        if torch.cuda.is_available():
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._memory.allocate(nbytes) if self._memory else super().allocate(nbytes)

    # Requests of ours ---------------------------------------------------------------------------------------------

    def call(self, peer: int, buffer: Tensor) -> Future[None]:
        """Request there, reply back into the buffer, on the lane to `peer`."""
        return self._callers.submit(self._call, peer, buffer)

    def _call(self, peer: int, buffer: Tensor) -> None:
        with self._losing(peer), (lane := self._lane(peer)).lock:
            header = self._announce(lane, Kind.CALL, buffer)
            self._send(lane, header, buffer)
            reply = wire.receive_header(lane.connection)
            if reply.kind == Kind.REFUSED:
                raise PeerLostError(peer, "it serves no more calls")
            if header.shared_fd < 0:
                wire.receive_into(lane.connection, buffer)
                self.traffic.bytes_received += buffer.nbytes

    def swap(self, round: int, outgoing: Tensor, incoming: Mapping[int, Tensor]) -> Future[None]:
        """Push to every peer of the round; their pushes are received by the threads that serve their lanes."""
        future = self._depending_on(tuple(incoming))
        self._swaps.post(round, incoming, future)
        for peer in incoming:
            self._callers.submit(self._push, peer, round, outgoing).add_done_callback(
                lambda sent, peer=peer: self._swaps.sent(round, peer, sent.exception())  # type: ignore[misc]
            )
        return future

    def _push(self, peer: int, round: int, outgoing: Tensor) -> None:
        with self._losing(peer), (lane := self._lane(peer)).lock:
            header = self._announce(lane, Kind.SWAP, outgoing, round)
            self._send(lane, header, outgoing)
            if header.shared_fd >= 0:
                wire.receive_header(lane.connection)  # taken: the buffer may change again

    def _send_final(self, peer: int, round: int, final: Tensor) -> None:
        def push() -> None:
            with contextlib.suppress(PeerLostError):
                self._push(peer, round, final)

        self._callers.submit(push)

    def _announce(self, lane: _Lane, kind: Kind, buffer: Tensor, round: int = 0) -> Header:
        place = self._memory.locate(buffer) if self._memory and lane.peer.host == self._host else None
        fd, offset = place or (-1, 0)
        return Header(kind, buffer.nbytes, round, fd, offset)

    def _send(self, lane: _Lane, header: Header, payload: Tensor) -> None:
        self.traffic.bytes_sent += wire.send(lane.connection, header, payload if header.shared_fd < 0 else None)
        self.traffic.messages[lane.peer.rank] += 1

    def _lane(self, peer: int) -> _Lane:
        with self._state:
            if peer in self._lost:
                raise PeerLostError(peer, self._lost[peer])
            if peer not in self._lanes:
                hello = Hello(self.rank, Purpose.LANE, os.getpid(), self._host)
                self._lanes[peer] = _Lane(*wire.connect(self._addresses[peer], hello, peer, self._secret))
            return self._lanes[peer]

    @contextlib.contextmanager
    def _losing(self, peer: int) -> contextlib._GeneratorContextManager[None]:  # type: ignore[misc]
        """Whatever the kernel says of a broken connection, the strategy hears who is gone."""
        try:
            yield
        except PeerLostError:
            raise
        except OSError as error:
            self._lose(peer, f"its connection broke ({error.strerror or error})")
            raise PeerLostError(peer, self._lost[peer]) from error

    # Requests of others ---------------------------------------------------------------------------------------------

    def serve(self, handler: Handler | None, undo: Handler | None = None) -> None:
        """Answer calls with `handler`; None refuses them from now on."""
        with self._slot:
            self._handler, self._undo = handler, undo
        self._serving.set()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(connection,), name="roundelay-lane", daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            hello = wire.accept(connection, self.rank, self._host, self._secret)
        except (HandshakeError, OSError, ValueError) as error:
            log.warning("learner %d refused a connection: %s", self.rank, error)
            connection.close()
            return
        if hello.purpose == Purpose.WATCH:
            self._watch.add(hello.rank, connection)
            return
        with self._state:
            self._accepted.setdefault(hello.rank, []).append(connection)
        try:
            while True:
                self._serve_one(connection, hello)
        except OSError:
            pass  # the peer has left or was given up; the watch tells whom it concerns
        except BaseException as error:  # noqa: BLE001 - it is raised where the training thread looks next
            self._failure = error
            self._fail_all(error)
        finally:
            connection.close()

    def _serve_one(self, connection: socket.socket, peer: Hello) -> None:
        header = wire.receive_header(connection)
        if header.kind == Kind.SWAP:
            self._take_swap(connection, header, peer)
            return
        self._serving.wait()
        with self._slot:
            request = self._payload(connection, header, peer)
            if self._handler is None:
                wire.send(connection, Header(Kind.REFUSED, 0))
                return
            self._handler(peer.rank, request)
            try:
                reply = Header(Kind.REPLY, header.nbytes, shared_fd=header.shared_fd)
                self.traffic.bytes_sent += wire.send(connection, reply, request if header.shared_fd < 0 else None)
            except OSError:
                if self._undo:
                    self._undo(peer.rank, request)
                raise

    def _payload(self, connection: socket.socket, header: Header, peer: Hello) -> Tensor:
        """The request: in the caller's own memory, or received into our one request buffer."""
        if header.shared_fd >= 0:
            assert self._memory is not None
            return self._memory.map(peer.pid, header.shared_fd, header.offset, header.nbytes)
        if self._request.nbytes < header.nbytes:
            self._request = torch.empty(header.nbytes, dtype=torch.uint8)
        request = self._request[: header.nbytes]
        wire.receive_into(connection, request)
        self.traffic.bytes_received += header.nbytes
        return request

    def _take_swap(self, connection: socket.socket, header: Header, peer: Hello) -> None:
        """Wait until we have come to that round ourselves; the payload waits in the socket or in the peer's memory."""
        target = self._swaps.target(header.round, peer.rank)
        if header.shared_fd >= 0:
            assert self._memory is not None
            if target is not None:
                target.copy_(self._memory.map(peer.pid, header.shared_fd, header.offset, header.nbytes))
            wire.send(connection, Header(Kind.TAKEN, 0))
        else:
            wire.receive_into(connection, target if target is not None else torch.empty(header.nbytes, dtype=torch.uint8))
            self.traffic.bytes_received += header.nbytes
        self._swaps.received(header.round, peer.rank)

    # Collectives, and the fate of peers -------------------------------------------------------------------------------

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """In the process group; fails as soon as the watch loses a member."""
        return self._guarded(members, lambda: self._collectives.all_reduce(values, members))

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """In the process group; fails as soon as the watch loses a member."""
        return self._guarded(members, lambda: self._collectives.broadcast(values, source, members))

    def _guarded(self, members: tuple[int, ...], start: Callable[[], Future[None]]) -> Future[None]:
        future = self._depending_on(members)
        if not future.done():
            start().add_done_callback(lambda ended: _settle(future, ended.exception()))
        return future

    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Keep answering swaps until every member has finished or is gone."""
        future = self._swaps.finish(final, set(members) - {self.rank} - set(self._lost))
        self._watch.finished()
        return future

    def _depending_on(self, peers: tuple[int, ...]) -> Future[None]:
        future: Future[None] = Future()
        with self._state:
            self._dependents = [entry for entry in self._dependents if not entry[1].done()]
            self._dependents.append((peers, future))
            lost = next((peer for peer in peers if peer in self._lost), None)
        if self._failure:
            _settle(future, self._failure)
        elif lost is not None:
            _settle(future, PeerLostError(lost, self._lost[lost]))
        return future

    def _noticed(self, event: Event, peer: int, reason: str) -> None:
        self._swaps.peer_finished(peer)
        if event != Event.FINISHED:
            self._lose(peer, reason, owes_nothing=event == Event.LEFT)

    def _lose(self, peer: int, reason: str, *, owes_nothing: bool = False) -> None:
        """`peer` is gone. Unless it left in order, what depends on it fails and threads blocked on it wake up."""
        with self._state:
            known = peer in self._lost
            self._lost.setdefault(peer, reason)
            if known or self._closed:
                return
            lane = self._lanes.get(peer)
            connections = self._accepted.get(peer, []) + ([lane.connection] if lane else [])
            failing = [future for peers, future in self._dependents if peer in peers]
        if not owes_nothing:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for future in failing:
                _settle(future, PeerLostError(peer, reason))
        self._tell_lost(peer, reason)

    def _fail_all(self, error: BaseException) -> None:
        with self._state:
            failing = [future for _, future in self._dependents]
        for future in failing:
            _settle(future, error)

    def check(self) -> None:
        """Raise what went wrong in a thread that served others."""
        if self._failure is not None:
            raise self._failure

    def close(self, failure: str = "") -> None:
        """Refuse calls, let the one being served end, say goodbye, and close every connection."""
        with self._state:
            if self._closed:
                return
            self._closed = True
        self.serve(None)
        self._watch.close(failure)
        with self._state:
            connections = [connection for group in self._accepted.values() for connection in group]
            connections += [lane.connection for lane in self._lanes.values()]
        self._swaps.close()
        for connection in [self._listener, *connections]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._callers.shutdown(wait=True)
        for lane in self._lanes.values():
            lane.connection.close()
        self._collectives.close()
        if self._memory:
            self._memory.close()


def _settle(future: Future[None], error: BaseException | None) -> None:
    """Complete a future that somebody else may have completed first."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error) if error else future.set_result(None)
