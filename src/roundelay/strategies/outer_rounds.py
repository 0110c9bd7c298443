"""Rounds of LocalSGD: the neighbours of a round give each other their messages, whatever their training threads do.

Each learner numbers its rounds in the same way. A learner that begins a round says so to the neighbours of that round. When both
ends of a pair have begun it, the one with the lower rank calls the other with its message, and the reply is the other's message.
A neighbour that has not begun the round is asked to, in the thread that serves the call. A neighbour that is lost or silent, has
passed the round already, or has another membership, is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from roundelay.clock import done
from roundelay.errors import PeerLostError, RefusedError
from roundelay.strategies.message_exchange import AnsweringEnd, exchange_messages
from roundelay.strategies.round_header import HEADER_BYTES, Kind, read_header, write_header
from roundelay.transport.base import Exchange, Transport
from roundelay.transport.messages import answering, ask


class OuterRounds:
    """What one learner has sent and received in its current round. Thread-safe.

    Args:
        transport: to the peers. This object serves its calls.
        asked: called, in a thread of the transport, when a peer has begun a round that this learner has not.

    Attributes:
        round: the current round; -1 before the first one.
        received: messages of the current round by peer. Read it after the round has ended.
    """

    def __init__(self, transport: Transport, asked: Callable[[], None]) -> None:
        self._transport, self._asked = transport, asked
        self.round, self.received = -1, dict[int, Tensor]()
        self._lock = threading.Lock()
        self._message = torch.empty(0, dtype=torch.uint8)
        self._open: set[int] = set()  # neighbours of the round whose message has not come
        self._exchanging: set[int] = set()  # neighbours whose message is on its way
        self._begun: dict[int, int] = {}  # by peer: the last round that it has said to have begun
        self._newest = -1  # the newest round of a peer that has passed ours
        self._silent: set[int] = set()
        self._leaving = False
        self._buffers: dict[int, list[Tensor]] = {}  # free ones by length, for calls: peers keep them mapped
        self._ended = done()
        self._begin_answer = answering(self._answer)
        transport.serve(self._serve)

    @property
    def next_round(self) -> int:
        """The round after the current one, or a later one if the peers have passed it."""
        return max(self.round + 1, self._newest)

    @property
    def wanted(self) -> bool:
        """Whether a peer has begun the next round and waits for this learner."""
        with self._lock:
            return not self._leaving and any(round > self.round for round in self._begun.values())

    def begin(self, round: int, peers: Iterable[int], message: Tensor) -> Future[None]:
        """Begin a round; the future is done when each of `peers` has given its message or was left out."""
        with self._lock:
            last, self.round = self.round, round
            self.received, self._message = {}, message
            lost = self._transport.lost
            self._open = {peer for peer in peers if peer not in lost and peer not in self._silent}
            ended = self._ended = Future()
            told = [(peer, Kind.BEGUN, round) for peer in self._open if not self._calls(peer)]
            # Peers that wait for this learner in a round that it passes, or that see another membership.
            told += [
                (peer, Kind.ABSENT, theirs)
                for peer, theirs in self._begun.items()
                if last < theirs <= round and not (theirs == round and peer in self._open)
            ]
            called = list(filter(self._calls, self._open))
        for peer, kind, number in told:
            self._tell(peer, kind, number)
        for peer in called:
            self._call(peer)
        self._end_if_complete()
        return ended

    def leave(self) -> None:
        """Take part in no more rounds. A peer that waits for this learner is told, in the round under way as well."""
        with self._lock:
            self._leaving = True
            waiting = [(peer, round) for peer, round in self._begun.items() if round > self.round]
            self._begun.clear()
        for peer, round in waiting:
            self._tell(peer, Kind.ABSENT, round)
        self._transport.serve(None)
        with self._lock:  # from now on only replies to our own messages can come
            round, unheard = self.round, self._open - self._exchanging
        for peer in unheard:
            self._leave_out(peer, round)
            self._tell(peer, Kind.ABSENT, round)

    def lose(self, peer: int) -> None:
        """`peer` is gone: go on without it. If it has left in order, its last message may still come."""
        with self._lock:
            self._begun.pop(peer, None)
            self._silent.discard(peer)
            exchanging = peer in self._exchanging
        if not exchanging:
            self._leave_out(peer)

    def set_silent(self, peer: int, *, silent: bool) -> None:
        """Go on without a peer whose heartbeats are missing; take it in again when they come."""
        with self._lock:
            self._silent.add(peer) if silent else self._silent.discard(peer)
            round, expected = self.round, silent and peer in self._open
        if expected:
            self._leave_out(peer, round)
            self._tell(peer, Kind.ABSENT, round)  # the peer reads this when it wakes up

    # What we say ---------------------------------------------------------------------------------------------------

    def _calls(self, peer: int) -> bool:
        """Whether we are the one to call this neighbour, now that both have begun the round. Needs the lock."""
        return peer in self._open and self._transport.rank < peer and self._begun.get(peer) == self.round

    def _tell(self, peer: int, kind: Kind, round: int) -> None:
        buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        write_header(buffer, kind, round, self.round)
        ask(self._transport, peer, buffer).add_done_callback(lambda reply: self._heard(peer, round, reply))

    def _heard(self, peer: int, round: int, reply: Future[Tensor]) -> None:
        """A peer has answered what we told it about `round`."""
        header = self._header_of(peer, round, reply)
        if header is None:
            return
        kind, _, theirs = header
        if kind == Kind.ABSENT:
            self._passed(peer, round, theirs)
        elif kind == Kind.BEGUN:
            self._peer_begun(peer, round)

    def _call(self, peer: int) -> None:
        with self._lock:
            round, message = self.round, self._message
            length = HEADER_BYTES + len(message)
            self._exchanging.add(peer)
            free = self._buffers.setdefault(length, [])
            buffer = free.pop() if free else self._transport.allocate(length)
        write_header(buffer, Kind.MESSAGE, round, round)
        buffer[HEADER_BYTES:] = message
        reply = exchange_messages(self._transport, peer, buffer, HEADER_BYTES)
        reply.add_done_callback(lambda reply: self._replied(peer, round, buffer, reply))

    def _replied(self, peer: int, round: int, buffer: Tensor, reply: Future[Tensor]) -> None:
        """A peer has answered our message of `round` with its own."""
        with self._lock:
            self._exchanging.discard(peer)
        header = self._header_of(peer, round, reply)
        if header is None:
            self._transport.free(buffer)  # a peer that is only frozen may still write to it
            return
        kind, _, theirs = header
        message = buffer[HEADER_BYTES:].clone()
        with self._lock:
            self._buffers[len(buffer)].append(buffer)
        if kind == Kind.MESSAGE:
            self._receive(peer, round, message)
        else:
            self._passed(peer, round, theirs)

    def _header_of(self, peer: int, round: int, reply: Future[Tensor]) -> tuple[int, int, int] | None:
        """The header of a reply; None if the peer is left out because the call has failed."""
        error = reply.exception()
        if not isinstance(error, PeerLostError | RefusedError):
            return read_header(reply.result())
        with self._lock:
            expected = round == self.round and peer in self._open
        self._leave_out(peer, round)
        if expected and isinstance(error, RefusedError):  # the peer lives, and would wait for us
            self._tell(peer, Kind.ABSENT, round)
        return None

    # What peers say ------------------------------------------------------------------------------------------------

    def _serve(self, peer: int, request: Tensor, reply: Tensor) -> AbstractContextManager[Exchange]:
        if len(request) == HEADER_BYTES:
            return self._begin_answer(peer, request, reply)
        return AnsweringEnd(
            request, reply, HEADER_BYTES, lambda: self._offered(peer, request, reply), self._taken(peer)
        )

    def _answer(self, peer: int, request: Tensor, reply: Tensor) -> None:
        kind, round, theirs = read_header(request)
        if kind == Kind.BEGUN:
            self._peer_begun(peer, round)
            if round > self.round and not self._leaving:
                self._asked()
        elif kind == Kind.ABSENT:
            self._passed(peer, round, theirs)
        with self._lock:
            if round > self.round and not self._leaving:
                kind = Kind.NOT_YET
            else:
                kind = Kind.BEGUN if round == self.round and peer in self._open else Kind.ABSENT
            write_header(reply, kind, round, self.round)

    def _offered(self, peer: int, request: Tensor, reply: Tensor) -> Tensor | None:
        """The header of a peer's message has come: our own message, or None if we do not exchange.

        If the two messages differ in length, they differ in form (full or compressed), and we do not exchange.
        """
        _, round, _ = read_header(request)
        with self._lock:
            willing = round == self.round and peer in self._open and len(request) == HEADER_BYTES + len(self._message)
            write_header(reply, Kind.MESSAGE if willing else Kind.ABSENT, round, self.round)
            message = self._message if willing else None
            if willing:
                self._exchanging.add(peer)
        if message is None:
            self._leave_out(peer, round)
        return message

    def _taken(self, peer: int) -> Callable[[Tensor | None], None]:
        """Called with the peer's message, or with None if the exchange has failed at both ends."""
        round = self.round

        def taken(message: Tensor | None) -> None:
            with self._lock:
                self._exchanging.discard(peer)
            self._leave_out(peer, round) if message is None else self._receive(peer, round, message)

        return taken

    def _peer_begun(self, peer: int, round: int) -> None:
        with self._lock:
            before = self._begun.get(peer, -1)
            self._begun[peer] = max(before, round)
            call = round != before and self._calls(peer)
        if call:
            self._call(peer)

    def _passed(self, peer: int, round: int, theirs: int) -> None:
        with self._lock:
            self._newest = max(self._newest, theirs)
        self._leave_out(peer, round)

    def _receive(self, peer: int, round: int, message: Tensor) -> None:
        with self._lock:
            if round == self.round and peer in self._open:
                self._open.discard(peer)
                self.received[peer] = message
        self._end_if_complete()

    def _leave_out(self, peer: int, round: int | None = None) -> None:
        """Expect no message of `peer` in the current round. No effect if `round` is given and is not current."""
        with self._lock:
            if round is None or round == self.round:
                self._open.discard(peer)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, self._ended if self._open else done()
            complete = not self._open and not ended.done()
        if complete:
            ended.set_result(None)
