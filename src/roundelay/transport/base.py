"""The transport interface: all that a strategy, a learner or an elastic run asks of the network.

Requests return futures at once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from roundelay.transport.refusals import Refusals

Address = tuple[str, int]


class Exchange(Protocol):
    """One end of an exchange of weights, which travel piece by piece. One thread of the transport uses it.

    The caller prepares a piece and sends it. The answering end receives the piece and applies it. This turns the
    piece into the reply, which it sends back. The caller applies the reply. Pieces go both ways at the same time.
    """

    @property
    def pieces(self) -> Sequence[Tensor]:
        """Flat uint8 tensors: where each piece of the request is, and later its reply."""

    @property
    def nbytes(self) -> int:
        """How much of the buffer the pieces take, with the gaps between them."""

    def prepare(self, k: int) -> None:
        """At the caller: fill piece k, or wait until the peer may read it in shared memory."""

    def apply(self, k: int) -> None:
        """Change the weights by piece k. Raises RefusedError if the piece is not acceptable."""


Begin = Callable[[int, Tensor, Tensor], AbstractContextManager[Exchange]]
"""Begins one end of an exchange: (peer, request, reply), two buffers of the same length, or the same buffer twice.

If the block of the context raises, the exchange has failed at both ends: the context takes back all pieces applied so far. Raises
RefusedError if the buffers do not fit. Several exchanges may be under way at the same time, in different threads.
"""

LostListener = Callable[[int, str], None]
"""Told once about every peer that is gone, and why."""


LEFT = "it has finished and left"
GAVE_UP = "it gave up"
NO_CALLS = "it serves no more calls"


class SilenceListener(Protocol):
    """Told when the heartbeats of a peer have been missing for a while, and when they come again."""

    def __call__(self, peer: int, *, silent: bool) -> None:
        """`peer` has fallen silent, or is heard again."""


@dataclass(frozen=True)
class Call:
    """An exchange that we ask for.

    Attributes:
        memory: the request, for a peer that shares memory with us and reads it in place.
        buffer: takes the reply. For a peer that shares no memory with us, it also holds the request until that is sent.
        begin: our end of the exchange.
        streams: replies come while the request is sent, as with several pieces. Only the virtual clock asks.
    """

    memory: Tensor
    buffer: Tensor
    begin: Begin
    streams: bool = True


@dataclass(frozen=True)
class Swap:
    """What all neighbours of a round send each other.

    Attributes:
        round: its number.
        outgoing: what every peer of `incoming` gets from us.
        incoming: by peer: filled with what that peer sends in the same round.
        wait: blocks, in a thread of the transport, until `outgoing` may be read.
    """

    round: int
    outgoing: Tensor
    incoming: Mapping[int, Tensor]
    wait: Callable[[], object] = lambda: None


@dataclass
class Traffic:
    """Bytes sent and received, and messages by peer."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # several threads send and receive

    def sent(self, peer: int, nbytes: int) -> None:
        """Count a message to `peer`."""
        with self._lock:
            self.bytes_sent += nbytes
            self.messages[peer] += 1

    def received(self, nbytes: int) -> None:
        """Count a message from a peer."""
        with self._lock:
            self.bytes_received += nbytes

    def reduced(self, nbytes: int, members: int) -> None:
        """Count a sum over members. Gloo does not report bytes, so this is what a ring would send: 2 (n-1)/n of them."""
        with self._lock:
            self.bytes_sent += 2 * (members - 1) * nbytes // members
            self.bytes_received += 2 * (members - 1) * nbytes // members


class Collectives(ABC):
    """Sums and broadcasts over any subset of learners, in place."""

    @abstractmethod
    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Sum over members."""

    @abstractmethod
    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Give every member the values of `source`."""

    def use_generation(self, generation: int) -> None:
        """Form new groups from now on, if groups change with the membership."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


class Transport(ABC):
    """One learner's connection to its peers.

    Buffers are flat uint8 tensors made by `allocate`; until the future of a request is done its buffers belong to the
    transport. A future fails with PeerLostError, which names the peer, if a peer that it depends on dies, freezes or
    leaves; how long a peer computes never matters. It fails with RefusedError if a message was not accepted.

    Attributes:
        rank: this learner.
        size: how many learners there are.
        local_size: how many of them run on this machine.
        traffic: what was sent and received.
        refused: what was not accepted, counted by reason.
        layout: code of the layout of the weights that travel; messages of another layout are refused; 0: not checked.
    """

    def __init__(self, rank: int, size: int, local_size: int | None = None) -> None:
        self.rank, self.size = rank, size
        self.local_size = local_size or size
        self.traffic = Traffic()
        self.refused = Refusals(f"learner {rank}")
        self.layout = 0
        self._lost_listeners: list[LostListener] = []
        self._silence_listeners: list[SilenceListener] = []

    # Exchanges -----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:
        """A buffer of the kind that this transport sends fastest."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def free(self, buffer: Tensor) -> None:
        """Give up a buffer made by `allocate` whose call has failed: a frozen peer may still write to it later."""

    @abstractmethod
    def swap(self, swap: Swap) -> Future[None]:
        """Send to every peer of the round, and receive what the peers send."""

    @abstractmethod
    def call(self, peer: int, call: Call) -> Future[None]:
        """Exchange with `peer`. The future is done when both ends have applied all pieces; if it fails, neither has.

        There is one exception. The caller confirms an exchange by its last message. If the connection breaks while that
        message is on its way, the caller has applied the exchange and the answering end takes it back.
        """

    @abstractmethod
    def serve(self, begin: Begin | None) -> None:
        """Answer calls with exchanges from `begin`, in the threads in which they arrive. Calls that came earlier have waited.

        None refuses calls; once this returns, no call is being served.
        """

    @abstractmethod
    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Sum `values` over `members`, in place. The first one may wait until all members have come to form a group."""

    @abstractmethod
    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Give every member the values of `source`, in place."""

    def use_generation(self, generation: int) -> None:
        """From now on collectives belong to this generation of the membership. Earlier groups are not used again."""

    @abstractmethod
    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Start no more swaps; `final` answers the swaps of slower members until all members have finished."""

    @abstractmethod
    def close(self, failure: str = "") -> None:
        """Say goodbye, with the reason if it is a failure, and release everything. Idempotent."""

    # Elasticity ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def offer(self, state: Callable[[], Tensor]) -> None:
        """Give the bytes of `state()` to a learner that asks for them by `fetch`. Learners that ask earlier wait."""

    @abstractmethod
    def fetch(self, peer: int) -> Future[Tensor]:
        """The bytes that `peer` offers."""

    @abstractmethod
    def admit(self, peer: int, address: Address) -> None:
        """`peer` has joined, or has come back, at this address; it will connect to us."""

    @abstractmethod
    def lose(self, peer: int, reason: str) -> None:
        """`peer` is gone: futures that depend on it fail, and listeners are told."""

    def give_up(self, peer: int, reason: str) -> None:
        """Tell `peer` that what it waits for will not come from us, so that it does not wait for ever: it loses us."""

    def keep_reaching(self, wanted: Callable[[], Iterable[int]], report: Callable[[int, bool], None]) -> None:
        """Connect again and again to peers of `wanted()` that are lost, if this transport can. For asynchronous exchanges.

        `report` is called, in a thread of the transport, with a peer and False when the peer is found to be cut off, and
        with True when it is reached again.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Have the training thread raise `error` at its next `check` or wait. Any thread may call this."""

    @abstractmethod
    def check(self) -> None:
        """Raise what `fail` was given, or what went wrong in a thread of the transport."""

    @property
    @abstractmethod
    def lost(self) -> dict[int, str]:
        """The peers that are gone, and why."""

    def metrics(self) -> dict[str, float]:
        """Bytes so far, and how many messages and connections were refused."""
        return {
            "bytes_sent": self.traffic.bytes_sent,
            "bytes_received": self.traffic.bytes_received,
            "refused": self.refused.counts.total(),
        }

    # Listeners -----------------------------------------------------------------------------------------------------

    def on_lost(self, listener: LostListener) -> None:
        """Tell `listener` about peers that are gone; it may be called from any thread."""
        self._lost_listeners.append(listener)

    def on_silent(self, listener: SilenceListener) -> None:
        """Tell `listener` about peers that fall silent or are heard again; it may be called from any thread."""
        self._silence_listeners.append(listener)

    def _tell_lost(self, peer: int, reason: str) -> None:
        for listener in list(self._lost_listeners):
            listener(peer, reason)

    def _tell_silent(self, peer: int, *, silent: bool) -> None:
        for listener in list(self._silence_listeners):
            listener(peer, silent=silent)
