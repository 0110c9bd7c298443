"""The transport seam: what a strategy may ask of the world. Every request returns a future at once."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roundelay.shadow import Shadow
from roundelay.transport.refusals import Refusals

Handler = Callable[[int, Tensor, Tensor], None]
"""Answers a call: (peer, request, reply). It reads the request once, which may change meanwhile, and fills the reply, which is as
long and may be the same memory.

It may raise RefusedError, having changed nothing: the call comes to nothing, and no more.
"""


@dataclass(frozen=True)
class Request:
    """What a call sends, read without a lock when the transport or the peer gets to it.

    Attributes:
        memory: read where it is by a peer that shares memory with us.
        pack: for the others: writes it into the call's buffer, and returns the part of that which is to travel.
    """

    memory: Tensor
    pack: Callable[[Tensor], Tensor]


Undo = Callable[[int, Tensor], None]
"""Takes back what a handler did: (peer, reply)."""

LEFT = "it has finished and left"
GAVE_UP = "it gave up"

LostListener = Callable[[int, str], None]
"""Told once about every peer that is gone, and why."""

QuietListener = Callable[[int, bool], None]
"""Told about every peer that is not heard for a while (True), and when it is heard again (False)."""


@dataclass
class Traffic:
    """What went over the wire, and how often with whom."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # several threads send and receive

    def sent(self, peer: int, nbytes: int) -> None:
        """A message to `peer`."""
        with self._lock:
            self.bytes_sent += nbytes
            self.messages[peer] += 1

    def received(self, nbytes: int) -> None:
        """A message from somebody."""
        with self._lock:
            self.bytes_received += nbytes

    def reduced(self, nbytes: int, members: int) -> None:
        """A sum over members, by what a ring sends and receives for it, 2 (n - 1) / n of the bytes; engines do not tell."""
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
        """Source's values for every member."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


class Transport(ABC):
    """One learner's way to its peers.

    Buffers are flat uint8 tensors made by `allocate`; until the future of a request is done its buffers belong to the
    transport. A future fails with PeerLostError, which names the peer, when somebody it depends on dies, freezes or leaves;
    how long a peer computes is never held against it. It fails with RefusedError when a message was not accepted.
    """

    def __init__(self, rank: int, size: int, local_size: int | None = None) -> None:
        self.rank, self.size = rank, size
        self.local_size = local_size or size  # learners on this machine
        self.traffic = Traffic()
        self.refused = Refusals(f"learner {rank}")
        self.layout = 0  # of the weights that travel, told by who sends them: another one is refused; 0: not said
        self._listeners: list[LostListener] = []
        self._quiet_listeners: list[QuietListener] = []

    def allocate(self, nbytes: int) -> Tensor:
        """A buffer of the kind this transport sends fastest."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def shadow(self, buffer: Tensor) -> Shadow | None:
        """Of a whole buffer made by `allocate`; None where memory is not there twice."""
        return None

    @abstractmethod
    def swap(self, round: int, outgoing: Tensor, incoming: Mapping[int, Tensor]) -> Future[None]:
        """Send `outgoing` to every peer of `incoming`, and fill `incoming` with what they send in the same round."""

    @abstractmethod
    def call(self, peer: int, buffer: Tensor, request: Request | None = None) -> Future[Tensor]:
        """Send `buffer` to `peer`, whose handler answers at once; the reply, as long as what was sent, replaces it.

        With a `request` that is sent instead, and `buffer` takes the reply only.
        """

    @abstractmethod
    def serve(self, handler: Handler | None, undo: Undo | None = None) -> None:
        """Answer calls with `handler` from now on, from whatever thread they come in; earlier calls have waited.

        `undo` is given the reply if it is certain that it never reached the caller. A handler of None refuses calls;
        once this returns, none is being served.
        """

    @abstractmethod
    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Sum `values` over `members`, in place. The first large one may wait for all members to come: they form a group."""

    @abstractmethod
    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Give every member `source`'s values, in place."""

    @abstractmethod
    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Swap no more of my own; `final` answers the swaps of those who still do, until all members have finished."""

    @abstractmethod
    def close(self, failure: str = "") -> None:
        """Say goodbye, with the reason if it is a bad one, and release everything. Idempotent."""

    def on_lost(self, listener: LostListener) -> None:
        """Have `listener` told about peers that are gone; it may be called from any thread."""
        self._listeners.append(listener)

    def on_quiet(self, listener: QuietListener) -> None:
        """Have `listener` told about peers that are not heard for a while; it may be called from any thread."""
        self._quiet_listeners.append(listener)

    def _tell_quiet(self, peer: int, *, quiet: bool) -> None:
        for listener in list(self._quiet_listeners):
            listener(peer, quiet)

    def check(self) -> None:
        """Raise what went wrong in the background since the last look, with its own traceback."""

    def _tell_lost(self, peer: int, reason: str) -> None:
        for listener in list(self._listeners):
            listener(peer, reason)
