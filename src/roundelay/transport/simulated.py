"""All learners in one process on a virtual clock: deterministic, with latency, bandwidth and faults on request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from roundelay.clock import VirtualClock
from roundelay.transport.base import LEFT
from roundelay.transport.heartbeats import LOST_AFTER_S, NO_HEARTBEAT, SILENT_AFTER_S
from roundelay.transport.simulated_transport import SimulatedTransport

Collective = tuple[tuple[int, ...], int]


class SimulatedNetwork:
    """The network between virtual learners: a message of b bytes takes latency_s + b / bandwidth_Bps.

    Faults are one line each: `network.kill(2, at=3.0)`, `network.cut(0, 1, at=3.0)`.
    """

    def __init__(
        self, clock: VirtualClock, size: int, *, latency_s: float = 0.0, bandwidth_Bps: float = float("inf")
    ) -> None:
        self.clock, self.size = clock, size
        self.latency_s, self.bandwidth_Bps = latency_s, bandwidth_Bps
        self.transports = [SimulatedTransport(rank, self) for rank in range(size)]
        self._cut: set[frozenset[int]] = set()
        self._held: dict[frozenset[int], list[Callable[[], None]]] = {}  # messages at a cut link, which TCP sends again
        self._collectives: dict[Collective, _Gathering] = {}

    def seconds(self, nbytes: int) -> float:
        """Time of one message."""
        return self.latency_s + nbytes / self.bandwidth_Bps

    def kill(self, rank: int, at: float) -> None:
        """Learner `rank` is gone from time `at`; the others notice at once, as with a closed connection."""
        self.clock.call_later(at - self.clock.now(), lambda: self.lose(rank, "its process ended"))

    def cut(self, a: int, b: int, at: float) -> None:
        """Nothing passes between `a` and `b` from time `at`; both notice when heartbeats are missing."""
        now, link = self.clock.now(), frozenset((a, b))

        def lost() -> None:
            if link in self._cut:  # it may have been mended before
                self._held.pop(link, None)
                self.transports[a].lose(b, NO_HEARTBEAT)
                self.transports[b].lose(a, NO_HEARTBEAT)

        self.clock.call_later(at - now, lambda: self._cut.add(link))
        self.clock.call_later(at - now + SILENT_AFTER_S, lambda: self._tell_silent(a, b))
        self.clock.call_later(at - now + LOST_AFTER_S, lost)

    def _tell_silent(self, a: int, b: int) -> None:
        silent = frozenset((a, b)) in self._cut
        self.transports[a]._tell_silent(b, silent=silent)
        self.transports[b]._tell_silent(a, silent=silent)

    def mend(self, a: int, b: int, at: float) -> None:
        """The link between `a` and `b` works again from time `at`; each admits the other, unless that one has gone."""

        def mended() -> None:
            self._cut.discard(frozenset((a, b)))
            for arrive in self._held.pop(frozenset((a, b)), []):
                self.clock.call_later(self.latency_s, arrive)
            for one, other in ((a, b), (b, a)):
                if not self.transports[other].gone:
                    self.transports[one].admit(other)
            self._tell_silent(a, b)

        self.clock.call_later(at - self.clock.now(), mended)

    def add(self) -> SimulatedTransport:
        """Add a learner; the others may call it from now on."""
        new = SimulatedTransport(self.size, self)
        for other in self.transports:
            if other.gone:
                new.lose(other.rank, LEFT if other.left else "its process ended")
        self.transports.append(new)
        self.size += 1
        return new

    def lose(self, rank: int, reason: str) -> None:
        """Take `rank` off the network and tell the others. A learner that has left in order cannot die any more."""
        if self.transports[rank].gone:
            return
        self.transports[rank].gone, self.transports[rank].left = True, reason == LEFT
        for transport in self.transports:
            if transport.rank != rank and not transport.gone:
                transport.lose(rank, reason)

    def deliver(
        self, sender: int, receiver: int, nbytes: int, action: Callable[[], None], *, streamed: bool = False
    ) -> None:
        """Run `action` at the receiver when the message arrives, if both ends still work then.

        A message that meets a cut link arrives when the link is mended, unless the ends have lost each other before.

        What a learner sent before it left in order still arrives. A `streamed` message is the reply to a
        request of the same size that has just arrived. Its pieces were sent while the request came in, so only the last
        piece is still on its way.
        """
        source, target = self.transports[sender], self.transports[receiver]
        if nbytes:
            source.traffic.sent(receiver, nbytes)

        def arrive() -> None:
            if target.gone or (source.gone and not source.left):
                return
            if frozenset((sender, receiver)) in self._cut:
                self._held.setdefault(frozenset((sender, receiver)), []).append(arrive)
            else:
                target.traffic.received(nbytes)
                action()

        self.clock.call_later(self.latency_s if streamed else self.seconds(nbytes), arrive)

    def gather(
        self, transport: SimulatedTransport, values: Tensor, members: tuple[int, ...], source: int | None
    ) -> Future[None]:
        """Join the next collective of `members`; with a `source` it is a broadcast, else a sum in order of rank."""
        number = transport.collectives.get(members, 0)
        transport.collectives[members] = number + 1
        gathering = self._collectives.setdefault((members, number), _Gathering())
        future = transport.pending(members)
        gathering.values[transport.rank], gathering.futures[transport.rank] = values, future
        if len(gathering.values) == len(members):
            del self._collectives[members, number]
            self.clock.call_later(2 * self.seconds(values.nbytes), lambda: gathering.complete(members, source))
        return future


@dataclass
class _Gathering:
    values: dict[int, Tensor] = field(default_factory=dict)
    futures: dict[int, Future[None]] = field(default_factory=dict)

    def complete(self, members: tuple[int, ...], source: int | None) -> None:
        if source is None:
            result = self.values[members[0]].clone()
            for member in members[1:]:
                result += self.values[member]
        else:
            result = self.values[source].clone()
        for member in members:
            self.values[member].copy_(result)
            if not self.futures[member].done():
                self.futures[member].set_result(None)
