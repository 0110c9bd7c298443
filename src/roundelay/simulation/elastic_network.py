"""The network of an elastic run on the virtual clock: connections that break, links that are cut, delayed or corrupt."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from roundelay.clock import VirtualClock
from roundelay.cluster.membership import Address
from roundelay.simulation.virtual_threads import VirtualProcess
from roundelay.transport.handshake import HANDSHAKE_S
from roundelay.transport.simulated import SimulatedNetwork, _Gathering

if TYPE_CHECKING:
    from roundelay.simulation.elastic_transport import ElasticTransport

RENDEZVOUS = -1  # the place of the rendezvous; a learner's place is its id


@dataclass
class Listener:
    """A port that a process has opened; connections wait until its transport exists."""

    process: VirtualProcess
    place: int
    closed: bool = False
    transport: ElasticTransport | None = None
    waiting: list[Callable[[ElasticTransport], None]] = field(default_factory=list)


class ElasticNetwork(SimulatedNetwork):
    """Places (learners, and the rendezvous) and the links between them.

    Messages of one connection arrive in order; those of different connections may overtake each other. A message that meets a cut
    link arrives when the link is mended, as with TCP.

    Args:
        clock: on which messages travel.
        latency_s: a message takes half of this to one and a half.
        seed: of the delays.

    Attributes:
        listeners: open ports.
        corrupt: links on which the next message with weights is altered.
        on_applied: called with a transport, an exchange, its difference and the sign, when weights have changed.
        on_attached: called with a transport when a strategy begins to serve calls on it.
    """

    def __init__(self, clock: VirtualClock, *, latency_s: float, seed: int) -> None:
        super().__init__(clock, 0, latency_s=latency_s)
        self._draw = random.Random(f"network {seed}")
        self.listeners: dict[Address, Listener] = {}
        self._cuts: set[tuple[int, int]] = set()
        self._delays: dict[tuple[int, int], float] = {}
        self._at_cut: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._last_arrival: dict[object, float] = {}
        self.corrupt: set[tuple[int, int]] = set()
        self.on_applied: Callable[[ElasticTransport, object, Tensor, float], None] = lambda *_: None
        self.on_attached: Callable[[ElasticTransport], None] = lambda transport: None

    # Links ---------------------------------------------------------------------------------------------------------------

    def cut_link(self, a: int, b: int) -> None:
        """Nothing passes from `a` to `b`."""
        self._cuts.add((a, b))

    def mend_link(self, a: int, b: int) -> None:
        """Messages from `a` to `b` pass again; those that were sent meanwhile arrive now."""
        self._cuts.discard((a, b))
        for arrive in self._at_cut.pop((a, b), []):
            self.clock.call_later(self.latency_s, arrive)

    def delay_link(self, a: int, b: int, seconds: float) -> None:
        """Messages from `a` to `b` take that much longer."""
        self._delays[a, b] = seconds

    def travel(
        self, source: int, target: int, process: VirtualProcess, action: Callable[[], None], connection: object
    ) -> None:
        """Run `action` in `process`, which is at `target`, when a message from `source` arrives there.

        Messages of the same `connection` and direction arrive in the order in which they were sent.
        """
        link = source, target
        due = self.clock.now() + self.latency_s * (0.5 + self._draw.random()) + self._delays.get(link, 0.0)
        key = connection, link
        due = self._last_arrival[key] = max(due, self._last_arrival.get(key, 0.0))

        def arrive() -> None:
            if link in self._cuts:
                self._at_cut.setdefault(link, []).append(arrive)
            else:
                process.run(action)

        self.clock.call_later(due - self.clock.now(), arrive)

    # Connections between learners ------------------------------------------------------------------------------------------

    def listen(self, process: VirtualProcess, place: int) -> Address:
        """Open a port."""
        address = (f"learner-{place}", len(self.listeners))
        self.listeners[address] = Listener(process, place)
        return address

    def handshake(
        self,
        source: VirtualProcess,
        place: int,
        address: Address,
        accepted: Callable[[ElasticTransport], None] = lambda transport: None,
    ) -> Future[ElasticTransport | None]:
        """Connect to a port. The result is the transport behind it, or None if the port is closed or does not answer in time.

        `accepted` is called at the other end.
        """
        answered: Future[ElasticTransport | None] = Future()
        listener, connection = self.listeners[address], object()

        def settle(transport: ElasticTransport | None) -> None:
            if not answered.done():
                answered.set_result(transport)

        def reply(transport: ElasticTransport | None) -> None:
            self.travel(listener.place, place, source, lambda: settle(transport), connection)

        def accept(transport: ElasticTransport) -> None:
            if transport.closed:
                reply(None)
            elif not answered.done():
                accepted(transport)
                reply(transport)

        def arrive() -> None:
            if listener.closed:
                reply(None)
            elif listener.transport is None:
                listener.waiting.append(accept)
            else:
                accept(listener.transport)

        if listener.process.alive:
            self.travel(place, listener.place, listener.process, arrive, connection)
            listener.process.on_end.append(lambda: reply(None))
        else:
            reply(None)
        source.call_later(HANDSHAKE_S, lambda: settle(None))
        return answered

    # Collectives ---------------------------------------------------------------------------------------------------------

    def gather(
        self,
        transport: Any,  # noqa: ANN401
        values: Tensor,
        members: tuple[int, ...],
        source: int | None,
    ) -> Future[None]:
        """Join the next collective of `members` in the generation of this transport."""
        group: Any = (transport.generation, members)
        number = transport.collectives.get(group, 0)
        transport.collectives[group] = number + 1
        gathering = self._collectives.setdefault((group, number), _Gathering())
        future: Future[None] = transport.pending(members)
        gathering.values[transport.rank], gathering.futures[transport.rank] = values, future
        if len(gathering.values) == len(members):
            del self._collectives[group, number]
            self.clock.call_later(2 * self.latency_s, lambda: gathering.complete(members, source))
        return future
