r"""A modelled network: nodes with fast links inside, one shared port each way between them, and faults.

A message of b bytes between two nodes occupies the sender's port outwards and the receiver's inwards for
$b / B$ seconds, one message after the other, and arrives a latency $\alpha$ later. Inside a node every learner has such
ports of its own, towards the node's fast links. A collective over g learners on each of G nodes takes

$$2(g-1)(\alpha_{in} + \tfrac{b}{g B_{in}}) + 2(G-1)(\alpha + \tfrac{b}{G B}),$$

a ring inside the nodes and one between them; a broadcast is sent along a pipeline once: half of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from roundelay.clock import VirtualClock
from roundelay.errors import RoundelayError
from roundelay.transport.heartbeats import SILENCE_S
from roundelay.transport.simulated import SimulatedNetwork, SimulatedTransport


@dataclass(frozen=True)
class Links:
    """The alpha-beta model of a cluster.

    Attributes:
        latency_s: of a message between nodes.
        bandwidth_Bps: of a node's port, each way.
        node_size: learners on a node, consecutive by rank.
        inside_latency_s: of a message inside a node.
        inside_bandwidth_Bps: of a learner's port inside its node, each way.

    >>> Links(latency_s=5e-6, bandwidth_Bps=12.5e9).allreduce_s(165e6, range(4))
    0.01983
    """

    latency_s: float = 0.0
    bandwidth_Bps: float = float("inf")
    node_size: int = 1
    inside_latency_s: float = 0.0
    inside_bandwidth_Bps: float = float("inf")

    def __post_init__(self) -> None:
        if self.node_size < 1 or self.bandwidth_Bps <= 0 or self.inside_bandwidth_Bps <= 0:
            raise RoundelayError(f"bandwidths are more than 0 and a node has at least 1 learner, got {self}")
        if self.latency_s < 0 or self.inside_latency_s < 0:
            raise RoundelayError(f"a latency is at least 0 s, got {self}")

    def node(self, learner: int) -> int:
        """Where `learner` is."""
        return learner // self.node_size

    def allreduce_s(self, nbytes: float, members: range | tuple[int, ...]) -> float:
        """A ring inside each node, and one between nodes."""
        nodes: dict[int, int] = {}
        for member in members:
            nodes[self.node(member)] = nodes.get(self.node(member), 0) + 1
        g, G = max(nodes.values()), len(nodes)
        inside = 2 * (g - 1) * (self.inside_latency_s + nbytes / g / self.inside_bandwidth_Bps)
        return inside + 2 * (G - 1) * (self.latency_s + nbytes / G / self.bandwidth_Bps)


_FreeAt = defaultdict[int, float]


class Ports:
    """Who is busy until when: messages queue at the sender's port and at the receiver's."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._inside: tuple[_FreeAt, _FreeAt] = (defaultdict(float), defaultdict(float))  # out of, into each learner
        self._between: tuple[_FreeAt, _FreeAt] = (defaultdict(float), defaultdict(float))  # out of, into each node

    def arrival(self, sender: int, receiver: int, nbytes: float, now: float) -> float:
        """When a message that is sent now arrives; its ports are busy until it is through."""
        links = self.links
        a, b = sender // links.node_size, receiver // links.node_size
        if a == b:
            (out, into), a, b = self._inside, sender, receiver
            busy_s, latency_s = nbytes / links.inside_bandwidth_Bps, links.inside_latency_s
        else:
            out, into = self._between
            busy_s, latency_s = nbytes / links.bandwidth_Bps, links.latency_s
        sent = out[a] = max(now, out[a]) + busy_s
        # The switch keeps what the receiver's port cannot take yet, so that nobody queues behind another's receiver.
        received = into[b] = max(sent, into[b] + busy_s)
        return received + latency_s


class ModelledNetwork(SimulatedNetwork):
    """A `SimulatedNetwork` over `Links`, with contention at the ports; every payload may stand for a larger model.

    Args:
        clock: the time it runs on.
        size: how many learners.
        links: the cluster.
        model_bytes: what a whole payload counts as, whatever its size here; None: its own size. Empty messages stay so.

    >>> clock = VirtualClock()
    >>> network = ModelledNetwork(clock, 8, Links(latency_s=1e-5, bandwidth_Bps=1e9, node_size=4))
    >>> network.kill(2, at=3.0); network.cut(0, 1, at=3.0); network.freeze(5, at=1.0, for_s=2.0)
    """

    def __init__(self, clock: VirtualClock, size: int, links: Links, model_bytes: float | None = None) -> None:
        super().__init__(clock, size, latency_s=links.latency_s, bandwidth_Bps=links.bandwidth_Bps)
        self.links, self.model_bytes = links, model_bytes
        self._ports = Ports(links)
        self._frozen: dict[int, float] = {}  # until when
        self._half_collective_s = 0.0

    def counted(self, nbytes: float) -> float:
        """What a payload of `nbytes` stands for."""
        return self.model_bytes if self.model_bytes is not None and nbytes else nbytes

    def freeze(self, rank: int, at: float, for_s: float) -> None:
        """Learner `rank` answers nothing for a while; put `compute.frozen` around its step times too.

        The others give it up once its heartbeats have been missing for too long.
        """
        now = self.clock.now()
        self.clock.call_later(at - now, lambda: self._frozen.__setitem__(rank, at + for_s))
        if for_s > SILENCE_S:
            reason = f"no heartbeat for {SILENCE_S:g} s"
            self.clock.call_later(at - now + SILENCE_S, lambda: self.lose(rank, reason))

    def deliver(self, sender: int, receiver: int, nbytes: int, action: Callable[[], None]) -> None:
        """Queue at both ports, travel, arrive: if both ends and the link still stand then."""
        now, counted = self.clock.now(), self.counted(nbytes)
        self.transports[sender].traffic.sent(receiver, int(counted))
        arrival = self._ports.arrival(sender, receiver, counted, now)
        self.clock.call_later(arrival - now, lambda: self._arrive(sender, receiver, int(counted), action))

    def _arrive(self, sender: int, receiver: int, nbytes: int, action: Callable[[], None]) -> None:
        thaw = max(self._frozen.get(sender, 0.0), self._frozen.get(receiver, 0.0)) - self.clock.now()
        if thaw > 0:
            self.clock.call_later(thaw, lambda: self._arrive(sender, receiver, nbytes, action))
            return
        source, target = self.transports[sender], self.transports[receiver]
        cut = frozenset((sender, receiver)) in self._cut
        if not cut and not target.gone and (source.left or not source.gone):
            target.traffic.received(nbytes)
            action()

    def gather(
        self, transport: SimulatedTransport, values: Tensor, members: tuple[int, ...], source: int | None
    ) -> Future[None]:
        """A collective, which takes what `Links` say; it does not contend with messages."""
        allreduce_s = self.links.allreduce_s(self.counted(values.nbytes), members)
        self._half_collective_s = allreduce_s / (2 if source is None else 4)
        return super().gather(transport, values, members, source)

    def seconds(self, nbytes: int) -> float:
        """Half of the collective that is being gathered."""
        return self._half_collective_s
