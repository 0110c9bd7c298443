"""Calls and swaps over TCP, or through shared memory between learners of one machine; see `watch` for heartbeats.

One connection per ordered pair, a *lane*: the side that connected sends requests on it and reads their answers, so that two
learners which call each other at the same time never mix up bytes. All waiting happens in threads blocked in the kernel; when
the watch gives a peer up, its lanes are shut down and those threads wake with an error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError

import torch
from torch import Tensor

from roundelay.errors import HandshakeError, PeerLostError, RefusedError, StrategyError
from roundelay.shadow import Shadow
from roundelay.transport import handshake, shared_memory
from roundelay.transport.acceptor import Acceptor, hang_up
from roundelay.transport.base import Collectives, Handler, Request, Transport, Undo
from roundelay.transport.callers import Callers
from roundelay.transport.checksum import SharedChecksum
from roundelay.transport.failure_detector import Event, FailureDetector
from roundelay.transport.framing import Connection, Header, Kind
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.heartbeats import BEAT_S
from roundelay.transport.receiver import Receiver
from roundelay.transport.security import Security
from roundelay.transport.shared_sums import SharedCollectives
from roundelay.transport.swaps import SwapBoard
from roundelay.transport.turns import Turns, give_way

log = logging.getLogger("roundelay")

Address = tuple[str, int]

SWAP_ATTEMPTS = 3
HEADER = "header"

ARRIVAL_S = 20.0  # all learners come from one meeting to `connect`, so that is long


class _Lane:
    """Our requests to one peer; connected when first used."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # one request at a time
        self.opened: Connection | None = None

    @property
    def channel(self) -> Connection:
        assert self.opened is not None
        return self.opened

    @property
    def connection(self) -> socket.socket:
        return self.channel.connection

    @property
    def peer(self) -> Hello:
        return self.channel.peer


class TcpTransport(Transport):
    """A learner's listening socket, its lanes to peers, and the watch.

    Args:
        rank: this learner.
        size: how many there are.
        listener: a socket that peers know the address of.
        security: what every connection must prove to know.
        collectives: the engine of sums and broadcasts, which groups of one machine need only to form.
        share_memory: let learners of this machine exchange through shared memory.
        local_size: how many learners this machine has; all of them unless said.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        listener: socket.socket,
        security: Security,
        collectives: Collectives,
        *,
        share_memory: bool = True,
        local_size: int | None = None,
    ) -> None:
        super().__init__(rank, size, local_size)
        self._security = security
        self._memory = shared_memory.SharedMemory() if shared_memory.available() else None
        self._shares = share_memory and self._memory is not None
        self._host = (
            handshake.this_host() if self._shares else bytes(16)
        )  # a learner that shares nothing is like nobody
        # Where there is a GPU, buffers are pinned instead.
        summing = self._memory if self._shares and not torch.cuda.is_available() else None
        self._collectives = SharedCollectives(
            collectives, rank, summing, self._host, hopeless=self.hopeless, depending_on=self._depending_on
        )
        self._addresses: dict[int, Address] = {}
        self._lanes: dict[int, _Lane] = {}
        self._accepted: dict[socket.socket, int] = {}  # whose it is
        self._state = threading.RLock()
        self._news = threading.Condition(self._state)
        self._lost: dict[int, str] = {}
        self._owing_nothing: set[int] = set()  # of those, who left in order: what they had begun with us will end
        self._dependents: list[tuple[tuple[int, ...], Future[None]]] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._swaps = SwapBoard(self._send_final)
        self._offered: Callable[[], Tensor] = lambda: torch.empty(0, dtype=torch.uint8)
        self._offering = threading.Event()
        self._inbox = Receiver(self, self.fail, share_memory=self._shares)
        self._turns = Turns()
        self._callers = Callers(size)
        self._watch = FailureDetector(self._noticed)
        self._gate = Acceptor(listener, security, self.refused, self._welcome, rank=rank, host=self._host)

    @property
    def address(self) -> Address:
        """Where peers find it."""
        return self._gate.address

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Learn where the peers are, and open a watch connection to each of higher rank; the others come to us.

        Raises PeerLostError if one is not there or never comes: without a watch nobody would notice its death.
        """
        self._addresses = dict(addresses)
        for peer in self._addresses:
            if peer > self.rank:
                try:
                    self._open_watch(peer)
                except OSError as error:
                    raise PeerLostError(peer, f"it does not answer ({error})") from error
        absent = self._watch.wait_for((peer for peer in self._addresses if peer < self.rank), ARRIVAL_S)
        if absent is not None:
            raise PeerLostError(absent, f"it has not connected within {ARRIVAL_S:g} s")

    def join(self, addresses: Mapping[int, Address]) -> None:
        """As `connect`, to peers that are under way already: we open all watches, and who is not there is lost."""
        self._addresses = dict(addresses)
        for peer in self._addresses:
            try:
                self._open_watch(peer)
            except OSError as error:
                self._lose(peer, f"it does not answer ({error})")

    def admit(self, peer: int, address: Address) -> None:
        """`peer` has joined, or come back; it opens the watch."""
        with self._state:
            self._addresses[peer] = address
            self._lost.pop(peer, None)
            self._owing_nothing.discard(peer)
            lane = self._lanes.pop(peer, None)
        if lane is not None and lane.opened:
            hang_up(lane.connection)
            lane.connection.close()

    def _open_watch(self, peer: int) -> None:
        hello = Hello(self.rank, Purpose.WATCH, os.getpid(), self._host)
        connection, _ = handshake.connect(self._addresses[peer], hello, peer, self._security)
        self._watch.add(peer, connection)

    @property
    def lost(self) -> dict[int, str]:
        """The peers that are gone, and why."""
        with self._state:
            return dict(self._lost)

    def allocate(self, nbytes: int) -> Tensor:
        """Memory that others could map, though they may only if it is shared; pinned where there is a GPU."""
        if torch.cuda.is_available():
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._memory.allocate(nbytes) if self._memory else super().allocate(nbytes)

    def shadow(self, buffer: Tensor) -> Shadow | None:
        """On Linux, of what is not pinned."""
        return self._memory.shadow(buffer) if self._memory else None

    # Requests of ours ---------------------------------------------------------------------------------------------

    def call(self, peer: int, buffer: Tensor, request: Request | None = None) -> Future[Tensor]:
        """Request there, reply back into the buffer, on the lane to `peer`."""
        submit = self._callers.submit_later if self._turns.patient else self._callers.submit
        return submit(self._call, peer, buffer, request, time.monotonic())

    def _call(self, peer: int, buffer: Tensor, request: Request | None, asked_s: float) -> Tensor:
        self._turns.waited(time.monotonic() - asked_s)
        with self._losing(peer), self._lane(peer) as lane:
            if (fd := self._shared_fd(lane, buffer)) >= 0:
                self._call_in_place(lane, buffer, fd, request)
                return buffer
            payload = request.pack(buffer) if request else buffer
            self._send(lane, Header(Kind.CALL, payload.nbytes, layout=self.layout), payload)
            self._inbox.receive(lane.channel, payload, self._answer_of(lane, Kind.REPLY))
            return payload

    def _call_in_place(self, lane: _Lane, buffer: Tensor, fd: int, request: Request | None) -> None:
        """Through shared memory: the peer reads the request and writes the reply where they are."""
        source_fd = self._shared_fd(lane, request.memory) if request else -1
        if request and source_fd < 0:
            buffer.copy_(request.memory)
        header = Header(Kind.CALL, buffer.nbytes, shared_fd=fd, source_fd=source_fd, layout=self.layout)
        with self._withdrawing(buffer):
            self._send(lane, header)
            self._answer_of(lane, Kind.REPLY)

    def _answer_of(self, lane: _Lane, expected: Kind) -> Header:
        try:
            return lane.channel.receive_answer(expected)
        except HandshakeError:
            self.refused.count(HEADER, f"an answer of learner {lane.peer.rank}")
            raise

    @contextlib.contextmanager
    def _withdrawing(self, buffer: Tensor) -> Iterator[None]:
        """If a call fails while its peer may still write the reply into our memory, that becomes other memory."""
        try:
            yield
        except OSError as error:
            if self._memory and not isinstance(error, PeerLostError):  # which is an answer
                self._memory.withdraw(buffer)
            raise

    def offer(self, state: Callable[[], Tensor]) -> None:
        """Give `state()`, bytes, to a learner that asks for it with `fetch`."""
        self._offered = state
        self._offering.set()

    def fetch(self, peer: int) -> Future[Tensor]:
        """What `peer` offers."""
        return self._callers.submit(self._fetch, peer)

    def _fetch(self, peer: int) -> Tensor:
        with self._losing(peer), self._lane(peer) as lane:
            lane.channel.send(Header(Kind.STATE, 0))
            header = self._answer_of(lane, Kind.STATE)
            state = torch.empty(header.nbytes, dtype=torch.uint8)
            self._inbox.receive(lane.channel, state, header)
            return state

    def _give_state(self, channel: Connection) -> None:
        self._offering.wait()
        state = self._offered()
        self.traffic.sent(channel.peer.rank, channel.send(Header(Kind.STATE, state.nbytes), state))

    def swap(self, round: int, outgoing: Tensor, incoming: Mapping[int, Tensor]) -> Future[None]:
        """Push to every peer of the round; their pushes are received by the threads that serve their lanes."""
        future = self._depending_on(tuple(incoming))
        self._swaps.post(round, incoming, future)
        checksum, patient, asked_s = SharedChecksum(outgoing), self._turns.patient, time.monotonic()
        for peer in incoming:
            pushed = self._callers.submit(self._push_in_turn, asked_s, peer, round, outgoing, checksum, patient=patient)
            pushed.add_done_callback(
                lambda sent, peer=peer: self._swaps.sent(round, peer, sent.exception())  # type: ignore[misc]
            )
        return future

    def _push_in_turn(self, asked_s: float, peer: int, round: int, outgoing: Tensor, checksum: SharedChecksum) -> None:
        self._turns.waited(time.monotonic() - asked_s)
        self._push(peer, round, outgoing, checksum)

    def _push(self, peer: int, round: int, outgoing: Tensor, checksum: SharedChecksum) -> None:
        with self._losing(peer), self._lane(peer) as lane:
            fd = self._shared_fd(lane, outgoing)
            header = Header(Kind.SWAP, outgoing.nbytes, round, fd, layout=self.layout)
            for attempts_left in reversed(range(SWAP_ATTEMPTS)):
                self._send(lane, header, outgoing if fd < 0 else None, checksum)
                try:
                    self._answer_of(lane, Kind.TAKEN)  # the buffer may change again
                    return
                except RefusedError:  # it came altered, and the peer waits for it
                    if not attempts_left:
                        raise

    def _send_final(self, peer: int, round: int, final: Tensor) -> None:
        def push() -> None:
            with contextlib.suppress(PeerLostError, RefusedError):
                self._push(peer, round, final, SharedChecksum(final))

        self._callers.submit(push)

    def _shared_fd(self, lane: _Lane, buffer: Tensor) -> int:
        """Where the peer finds the buffer in memory of ours, -1 if it does not."""
        return self._memory.locate(buffer) if self._memory and self._shares and lane.peer.host == self._host else -1

    def _send(
        self, lane: _Lane, header: Header, payload: Tensor | None = None, checksum: SharedChecksum | None = None
    ) -> None:
        self.traffic.sent(lane.peer.rank, lane.channel.send(header, payload, checksum))

    @contextlib.contextmanager
    def _lane(self, peer: int) -> Iterator[_Lane]:
        """The lane to `peer`, for one request; connects without the state lock, for a frozen peer must not freeze our watch."""
        with self._state:
            lane = self._lanes.setdefault(peer, _Lane())
        with lane.lock:
            self._refuse_lost(peer)
            if lane.opened is None:
                hello = Hello(self.rank, Purpose.LANE, os.getpid(), self._host)
                lane.opened = Connection(*handshake.connect(self._addresses[peer], hello, peer, self._security))
                self._refuse_lost(peer)  # meanwhile? then nobody has shut this connection down
            yield lane

    def _refuse_lost(self, peer: int) -> None:
        with self._state:
            if peer in self._lost:
                raise PeerLostError(peer, self._lost[peer])
            if self._closed:
                raise PeerLostError(peer, "this learner has closed")

    @contextlib.contextmanager
    def _losing(self, peer: int) -> Iterator[None]:
        """Whatever the kernel says of a broken connection, the strategy hears who is gone."""
        try:
            yield
        except PeerLostError:
            raise
        except OSError as error:
            with self._state:  # the watch may know in a moment why: it has left, or died, or said what went wrong
                self._news.wait_for(lambda: peer in self._lost or self._closed, timeout=BEAT_S)
            reason = f"its connection broke ({error.strerror or error})"
            self._lose(peer, reason)
            raise PeerLostError(peer, self.lost.get(peer, reason)) from error

    # Requests of others ---------------------------------------------------------------------------------------------

    def serve(self, handler: Handler | None, undo: Undo | None = None) -> None:
        """Answer calls with `handler`; None refuses them from now on."""
        self._inbox.serve(handler, undo)

    def _welcome(self, connection: socket.socket, hello: Hello) -> None:
        if hello.purpose == Purpose.WATCH:
            self._watch.add(hello.rank, connection)
            return
        with self._state:
            if self._closed:
                connection.close()
                return
            self._accepted[connection] = hello.rank
        self._serve_lane(Connection(connection, hello))

    def _serve_lane(self, channel: Connection) -> None:
        """Until its end, or until threads are to be of the other kind: then the next one goes on."""
        patient = self._turns.patient
        give_way(patient=patient)
        try:
            while self._turns.patient == patient:
                self._serve_one(channel)
            self._gate.start(functools.partial(self._serve_lane, channel))
            return
        except HandshakeError as error:
            self.refused.count(HEADER, f"a message of learner {channel.peer.rank}, and closed its connection ({error})")
        except OSError:
            pass  # the peer has left or was given up; the watch tells whom it concerns
        except BaseException as error:  # it is raised where the training thread looks next
            self.fail(error)
        self._forget(channel)

    def _forget(self, channel: Connection) -> None:
        with self._state:
            self._accepted.pop(channel.connection, None)
        channel.connection.close()

    def _serve_one(self, channel: Connection) -> None:
        header = channel.receive()
        if header.kind == Kind.SWAP:
            self._take_swap(channel, header)
        elif header.kind == Kind.STATE:
            self._give_state(channel)
        elif header.kind == Kind.CALL:
            self._inbox.answer(channel, header)
        else:
            raise HandshakeError(f"the other end sent {header.kind.name}, which nobody asked for")

    def _take_swap(self, channel: Connection, header: Header) -> None:
        """Wait until we have come to that round ourselves; the payload waits in the socket or in the peer's memory."""
        peer = channel.peer.rank
        target = self._swaps.target(header.round, peer)
        if target is not None and (target.nbytes != header.nbytes or self._inbox.is_other_layout(header)):
            raise StrategyError(
                f"learner {peer} swaps weights of another model with us ({header.nbytes} bytes, ours are {target.nbytes}); "
                "build the same model everywhere"
            )
        buffer = torch.empty(header.nbytes, dtype=torch.uint8) if target is None else target
        try:
            if header.shared_fd >= 0:
                buffer.copy_(self._inbox.mapped(channel, header.shared_fd, header.nbytes))
            else:
                self._inbox.receive(channel, buffer, header)
        except RefusedError as error:
            if target is not None:
                channel.refuse(error.reason)
                return
        channel.send(Header(Kind.TAKEN, 0))
        self._swaps.received(header.round, peer)

    # Collectives, and the fate of peers -------------------------------------------------------------------------------

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Fails as soon as the watch loses a member. Counted as what a ring of members sends."""
        self.traffic.reduced(values.nbytes, len(members))
        return self._guarded(members, lambda: self._collectives.all_reduce(values, members))

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Fails as soon as the watch loses a member."""
        return self._guarded(members, lambda: self._collectives.broadcast(values, source, members))

    def _guarded(self, members: tuple[int, ...], start: Callable[[], Future[None]]) -> Future[None]:
        try:
            return self._depending_on(members, None if self.hopeless(members) else start())
        except ConnectionError as error:
            future = self._depending_on(members)
            _settle(future, error)  # unless it has failed already, because of a member that is lost
            return future

    def hopeless(self, members: tuple[int, ...]) -> bool:
        """Whether a collective of these will never end."""
        with self._state:
            return self._failure is not None or not self._lost.keys().isdisjoint(members)

    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Keep answering swaps until every member has finished or is gone."""
        with self._state:
            others = set(members) - {self.rank} - set(self._lost)
        future = self._depending_on(())  # a failure in the background ends it too
        self._swaps.finish(final, others).add_done_callback(lambda ended: _settle(future, ended.exception()))
        self._watch.finished()
        return future

    def _depending_on(self, peers: tuple[int, ...], future: Future[None] | None = None) -> Future[None]:
        """`future` (or a new one), failed now or later if one of `peers` is lost.

        One that is under way already is not failed by a peer that has done its part and left in the meantime.
        """
        harmless: set[int] = self._owing_nothing if future else set()
        future = Future() if future is None else future
        with self._state:
            self._dependents = [entry for entry in self._dependents if not entry[1].done()]
            self._dependents.append((peers, future))
            lost = next((peer for peer in peers if peer in self._lost and peer not in harmless), None)
        if self._failure:
            _settle(future, self._failure)
        elif lost is not None:
            _settle(future, PeerLostError(lost, self._lost[lost]))
        return future

    def _noticed(self, event: Event, peer: int, reason: str) -> None:
        try:
            if event in (Event.QUIET, Event.HEARD):
                self._tell_quiet(peer, quiet=event == Event.QUIET)
                return
            self._swaps.peer_finished(peer)
            if event != Event.FINISHED:
                self._lose(peer, reason, owes_nothing=event == Event.LEFT)
        except BaseException as error:  # the watch must go on beating
            self.fail(error)

    def _lose(self, peer: int, reason: str, *, owes_nothing: bool = False) -> None:
        """`peer` is gone. Unless it left in order, what depends on it fails and threads blocked on it wake up."""
        with self._state:
            known = peer in self._lost
            self._lost.setdefault(peer, reason)
            self._news.notify_all()
            if owes_nothing and not known:
                self._owing_nothing.add(peer)
            if known:
                return
            closed = self._closed  # then somebody may still be blocked on this peer, and close() on that
            connections = [connection for connection, whose in self._accepted.items() if whose == peer]
            if (lane := self._lanes.get(peer)) and lane.opened:
                connections.append(lane.connection)
            failing = [future for peers, future in self._dependents if peer in peers]
        if not owes_nothing:
            for connection in connections:
                hang_up(connection)
            for future in failing:
                _settle(future, PeerLostError(peer, reason))
        if not closed:
            self._tell_lost(peer, reason)

    def lose(self, peer: int, reason: str) -> None:
        """Somebody who knows says that `peer` is gone."""
        self._lose(peer, reason)

    def fail(self, error: BaseException) -> None:
        """Have the training thread raise `error` where it looks or waits next."""
        with self._state:
            self._failure = self._failure or error
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
            self._news.notify_all()
        self.serve(None)
        self._offering.set()
        self._watch.close(failure)
        self._swaps.close()
        self._gate.close()
        for connection in self._connections():
            hang_up(connection)
        self._callers.shutdown()
        self._gate.join()
        for (
            connection
        ) in self._connections():  # also one that nobody came to serve any more, or that was opened meanwhile
            connection.close()
        self._collectives.close()
        if self._memory:
            self._memory.close()

    def _connections(self) -> list[socket.socket]:
        with self._state:
            return [*self._accepted, *(lane.connection for lane in self._lanes.values() if lane.opened)]


def _settle(future: Future[None], error: BaseException | None) -> None:
    """Complete a future that somebody else may have completed first."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error) if error else future.set_result(None)
