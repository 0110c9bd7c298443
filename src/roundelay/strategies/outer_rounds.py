"""Rounds of LocalSGD: the neighbours of a round give each other their messages, whatever their training threads do.

Each learner numbers its rounds in the same way. A learner that begins a round says so to the neighbours of that round. When both
ends of a pair have begun it, the one with the lower rank calls the other with its message, and the reply is the other's message.
A neighbour that has not begun the round is asked to, in the thread that serves the call. A neighbour that is lost or silent, has
passed the round already, or has another membership, is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager

from torch import Tensor

from roundelay.errors import PeerLostError, RefusedError
from roundelay.strategies.round_messages import HEADER_BYTES, AnsweringEnd, Header, Kind, Reply, RoundMessages
from roundelay.strategies.round_state import RoundState, Told
from roundelay.transport.base import Exchange, Transport


class OuterRounds:
    """One learner's part in the rounds: tells peers what it does, calls them, and serves their calls. Thread-safe.

    Args:
        transport: to the peers. This object serves its calls.
        asked: called, in a thread of the transport, when a peer has begun a round that this learner has not.
        knows: whether a learner is a member. One that has joined may speak before this learner is told of it, and cannot be
            called yet.

    Attributes:
        state: which round is current, and the messages received in it. Read those after the round has ended.
    """

    def __init__(self, transport: Transport, asked: Callable[[], None], knows: Callable[[int], bool]) -> None:
        self._transport, self._asked, self._knows = transport, asked, knows
        self.state = RoundState(transport.rank)
        self._messages = RoundMessages(transport)
        transport.serve(self._serve)

    def begin(self, round: int, peers: Iterable[int], message: Tensor) -> Future[None]:
        """Begin a round; the future is done when each of `peers` has given its message or was left out."""
        # A peer that is lost from here on is left out when the call to it fails.
        ended, told, called = self.state.begin(round, set(peers) - self._transport.lost.keys(), message)
        self._tell(told)
        for peer in called:
            self._call(peer)
        self.state.end_if_complete()
        return ended

    def leave(self) -> None:
        """Take part in no more rounds. A peer that waits for this learner is told, in the round under way as well."""
        self._tell(self.state.leave())
        self._transport.serve(None)  # from now on only replies to our own messages can come
        self._tell(self.state.leave_out_unheard())

    def lose(self, peer: int) -> None:
        """`peer` is gone: go on without it."""
        self.state.peer_lost(peer)

    def set_silent(self, peer: int, *, silent: bool) -> None:
        """Go on without a peer whose heartbeats are missing; take it in again when they come."""
        self._tell(self.state.peer_silent(peer, silent=silent))

    # What we say ---------------------------------------------------------------------------------------------------

    def _tell(self, told: Told) -> None:
        for peer, kind, round in told:
            reply = self._messages.tell(peer, Header(kind, round, self.state.round))
            reply.add_done_callback(functools.partial(self._replied, peer, round))

    def _call(self, peer: int) -> None:
        round, message = self.state.begin_call(peer)

        def ended(reply: Future[Reply]) -> None:
            self.state.end_exchange(peer)
            self._replied(peer, round, reply)

        self._messages.exchange(peer, round, message).add_done_callback(ended)

    def _replied(self, peer: int, round: int, reply: Future[Reply]) -> None:
        """A peer has answered what we told or sent it in `round`, or the call has failed."""
        error = reply.exception()
        if isinstance(error, PeerLostError | RefusedError):
            told = self.state.leave_out(peer, round)
            if isinstance(error, RefusedError):  # the peer lives, and would wait for us
                self._tell(told)
            return
        header, message = reply.result()
        if header.kind == Kind.MESSAGE:
            self.state.receive(peer, round, message)
        elif header.kind == Kind.BEGUN:
            self._peer_begun(peer, round)
        elif header.kind == Kind.ABSENT:
            self.state.peer_absent(peer, round, header.own_round)

    def _peer_begun(self, peer: int, round: int) -> None:
        if self.state.peer_begun(peer, round):
            self._call(peer)

    # What peers say ------------------------------------------------------------------------------------------------

    def _serve(self, peer: int, request: Tensor, reply: Tensor) -> AbstractContextManager[Exchange]:
        answer = self._answer if len(request) == HEADER_BYTES else self._offered
        return AnsweringEnd(request, reply, lambda: answer(peer, request, reply), self._taken(peer))

    def _answer(self, peer: int, request: Tensor, reply: Tensor) -> None:
        """A peer has begun a round, or takes no part in one."""
        kind, round, theirs = Header.read(request)
        if not self._knows(peer):
            Header(Kind.ABSENT, round, self.state.round).write(reply)
            return
        if kind == Kind.BEGUN:
            self._peer_begun(peer, round)
            if self.state.awaits(round):
                self._asked()
        elif kind == Kind.ABSENT:
            self.state.peer_absent(peer, round, theirs)
        self.state.answer(peer, round).write(reply)

    def _offered(self, peer: int, request: Tensor, reply: Tensor) -> Tensor | None:
        """The header of a peer's message has come. Returns our own message, or None if we do not exchange."""
        round = Header.read(request).round
        message = self.state.begin_answer(peer, round, len(request) - HEADER_BYTES)
        Header(Kind.ABSENT if message is None else Kind.MESSAGE, round, self.state.round).write(reply)
        if message is None:
            self.state.leave_out(peer, round)
        return message

    def _taken(self, peer: int) -> Callable[[Tensor | None], None]:
        """Called with the peer's message, or with None if the exchange has failed at both ends."""
        round = self.state.round

        def taken(message: Tensor | None) -> None:
            self.state.end_exchange(peer)
            if message is None:
                self.state.leave_out(peer, round)
            else:
                self.state.receive(peer, round, message)

        return taken
