"""The state of a LocalSGD round as a value: which neighbours have given their messages. No transport, so any clock tests it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future

import torch
from torch import Tensor

from roundelay.clock import done
from roundelay.strategies.round_messages import Header, Kind

Told = list[tuple[int, Kind, int]]
"""What to tell peers: (peer, kind, round)."""


class RoundState:
    """What one learner has received in its current round, and which rounds its peers have begun. Thread-safe.

    Args:
        rank: this learner.

    Attributes:
        round: the current round; -1 before the first one.
        message: this learner's own message of the round.
        received: messages of the current round by peer.
        leaving: this learner takes part in no more rounds.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.round, self.received = -1, dict[int, Tensor]()
        self.message = torch.empty(0, dtype=torch.uint8)
        self.leaving = False
        self._lock = threading.Lock()
        self._open: set[int] = set()  # neighbours of the round whose message has not come
        self._exchanging: set[int] = set()  # neighbours whose message is on its way
        self._begun: dict[int, int] = {}  # by peer: the last round that it has said to have begun
        self._newest = -1  # the newest round of a peer that has passed ours
        self._silent: set[int] = set()
        self._ended = done()

    @property
    def next_round(self) -> int:
        """The round after the current one, or a later one if the peers have passed it."""
        return max(self.round + 1, self._newest)

    @property
    def wanted(self) -> bool:
        """Whether a peer has begun the next round and waits for this learner."""
        with self._lock:
            return not self.leaving and any(round > self.round for round in self._begun.values())

    def awaits(self, round: int) -> bool:
        """Whether this learner may still begin `round`."""
        return round > self.round and not self.leaving

    # The learner itself ----------------------------------------------------------------------------------------------

    def begin(self, round: int, peers: Iterable[int], message: Tensor) -> tuple[Future[None], Told, list[int]]:
        """Begin a round without the `peers` that are silent.

        Returns a future that is done when each peer has given its message or was left out, what to tell peers, and
        the peers to call.
        """
        with self._lock:
            last, self.round = self.round, round
            self.received, self.message = {}, message
            self._open = set(peers) - self._silent
            ended = self._ended = Future()
            told = [(peer, Kind.BEGUN, round) for peer in self._open if not self._calls(peer)]
            # Peers that wait for this learner in a round that it passes, or that see another membership.
            told += [
                (peer, Kind.ABSENT, theirs)
                for peer, theirs in self._begun.items()
                if last < theirs <= round and not (theirs == round and peer in self._open)
            ]
            return ended, told, list(filter(self._calls, self._open))

    def leave(self) -> Told:
        """Begin no more rounds. Returns what to tell the peers that wait for this learner in a later round."""
        with self._lock:
            self.leaving = True
            waiting: Told = [(peer, Kind.ABSENT, round) for peer, round in self._begun.items() if round > self.round]
            self._begun.clear()
            return waiting

    def leave_out_unheard(self) -> Told:
        """Leave out the neighbours whose message is not on its way. Returns what to tell them."""
        with self._lock:
            unheard = self._open - self._exchanging
            self._open -= unheard
            told: Told = [(peer, Kind.ABSENT, self.round) for peer in unheard]
        self.end_if_complete()
        return told

    # Peers -----------------------------------------------------------------------------------------------------------

    def peer_begun(self, peer: int, round: int) -> bool:
        """`peer` has begun `round`. Returns whether to call it."""
        with self._lock:
            before = self._begun.get(peer, -1)
            self._begun[peer] = max(before, round)
            return round != before and self._calls(peer)

    def peer_absent(self, peer: int, round: int, theirs: int) -> None:
        """`peer`, which is in round `theirs` itself, takes no part in `round` with us."""
        with self._lock:
            self._newest = max(self._newest, theirs)
        self.leave_out(peer, round)

    def peer_lost(self, peer: int) -> None:
        """`peer` is gone. If it has left in order, its last message may still come."""
        with self._lock:
            self._begun.pop(peer, None)
            self._silent.discard(peer)
            exchanging = peer in self._exchanging
        if not exchanging:
            self.leave_out(peer)

    def peer_silent(self, peer: int, *, silent: bool) -> Told:
        """Heartbeats of `peer` are missing, or come again. Returns what to tell it, which it reads when it wakes up."""
        with self._lock:
            self._silent.add(peer) if silent else self._silent.discard(peer)
            round, expected = self.round, silent and peer in self._open
        return self.leave_out(peer, round) if expected else []

    def answer(self, peer: int, round: int) -> Header:
        """What to answer a peer that speaks about `round`."""
        with self._lock:
            if self.awaits(round):
                return Header(Kind.NOT_YET, round, self.round)
            takes_part = round == self.round and peer in self._open
            return Header(Kind.BEGUN if takes_part else Kind.ABSENT, round, self.round)

    # Messages --------------------------------------------------------------------------------------------------------

    def begin_call(self, peer: int) -> tuple[int, Tensor]:
        """This learner calls `peer`. Returns the round and the own message."""
        with self._lock:
            self._exchanging.add(peer)
            return self.round, self.message

    def begin_answer(self, peer: int, round: int, length: int) -> Tensor | None:
        """`peer` calls with its message, of `length` bytes. Returns our own, or None if we do not exchange.

        If the two messages differ in length, they differ in form (full or compressed), and we do not exchange.
        """
        with self._lock:
            if round != self.round or peer not in self._open or length != len(self.message):
                return None
            self._exchanging.add(peer)
            return self.message

    def end_exchange(self, peer: int) -> None:
        """No message is on its way between `peer` and this learner any more."""
        with self._lock:
            self._exchanging.discard(peer)

    def receive(self, peer: int, round: int, message: Tensor) -> None:
        """The message of `peer` has come; it counts if it is expected."""
        with self._lock:
            if round == self.round and peer in self._open:
                self._open.discard(peer)
                self.received[peer] = message
        self.end_if_complete()

    def leave_out(self, peer: int, round: int | None = None) -> Told:
        """Expect no message of `peer` in the current round. No effect if `round` is given and is not current.

        Returns what to tell the peer if it was expected and lives.
        """
        with self._lock:
            current = self.round
            expected = round in (None, current) and peer in self._open
            if expected:
                self._open.discard(peer)
        self.end_if_complete()
        return [(peer, Kind.ABSENT, current)] if expected else []

    def end_if_complete(self) -> None:
        """Complete the future of the round if no message is missing."""
        with self._lock:
            ended, self._ended = self._ended, self._ended if self._open else done()
            complete = not self._open and not ended.done()
        if complete:
            ended.set_result(None)

    def _calls(self, peer: int) -> bool:
        """Whether we are the one to call this neighbour, now that both have begun the round. Needs the lock."""
        return peer in self._open and self._rank < peer and self._begun.get(peer) == self.round
