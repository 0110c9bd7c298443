r"""A modelled network: nodes with fast links inside, one port in each direction per node, and faults.

A message of b bytes between two nodes occupies the outward port of the sender's node and the inward port of the
receiver's node for $b / B$ seconds. Messages queue at ports. A message arrives one latency $\alpha$ after it has left
its ports. Inside a node every learner has its own pair of ports to the node's fast links. A collective over g learners on
each of G nodes takes

$$2(g-1)(\alpha_{in} + \tfrac{b}{g B_{in}}) + 2(G-1)(\alpha + \tfrac{b}{G B}),$$

which is a ring inside the nodes and a ring between them. A broadcast is a pipeline and takes half of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from roundelay.clock import VirtualClock
from roundelay.errors import RoundelayError
from roundelay.transport.heartbeats import LOST_AFTER_S
from roundelay.transport.simulated import SimulatedNetwork
from roundelay.transport.simulated_transport import SimulatedTransport


@dataclass(frozen=True)
class Links:
    """The alpha-beta model of a cluster.

    Attributes:
        latency_s: latency of a message between nodes.
        bandwidth_Bps: bandwidth of a node's port, in each direction.
        node_size: learners per node, consecutive by rank.
        inside_latency_s: latency of a message inside a node.
        inside_bandwidth_Bps: bandwidth of a learner's port inside its node, in each direction.

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
            raise RoundelayError(f"bandwidths must be more than 0 and node_size at least 1, got {self}")
        if self.latency_s < 0 or self.inside_latency_s < 0:
            raise RoundelayError(f"latencies must be at least 0 s, got {self}")

    def node(self, learner: int) -> int:
        """The node of `learner`."""
        return learner // self.node_size

    def allreduce_s(self, nbytes: float, members: range | tuple[int, ...]) -> float:
        """Seconds of an allreduce over `members`: a ring inside each node, and one between nodes."""
        nodes: dict[int, int] = {}
        for member in members:
            nodes[self.node(member)] = nodes.get(self.node(member), 0) + 1
        g, G = max(nodes.values()), len(nodes)
        inside = 2 * (g - 1) * (self.inside_latency_s + nbytes / g / self.inside_bandwidth_Bps)
        return inside + 2 * (G - 1) * (self.latency_s + nbytes / G / self.bandwidth_Bps)


_FreeAt = defaultdict[int, float]


class Ports:
    """Until when each port is busy: messages queue at the sender's port and at the receiver's port."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._inside: tuple[_FreeAt, _FreeAt] = (
            defaultdict(float),
            defaultdict(float),
        )  # outward and inward, by learner
        self._between: tuple[_FreeAt, _FreeAt] = (defaultdict(float), defaultdict(float))  # outward and inward, by node

    def arrival(self, sender: int, receiver: int, nbytes: float, now: float, *, streamed: bool = False) -> float:
        """The time at which a message that is sent at `now` arrives; each port is busy until the message has passed.

        `streamed`: the message was sent while a message of the same size came in, and that message has just arrived.
        """
        links = self.links
        a, b = sender // links.node_size, receiver // links.node_size
        if a == b:
            (out, into), a, b = self._inside, sender, receiver
            busy_s, latency_s = nbytes / links.inside_bandwidth_Bps, links.inside_latency_s
        else:
            out, into = self._between
            busy_s, latency_s = nbytes / links.bandwidth_Bps, links.latency_s
        sent = out[a] = max(now - busy_s if streamed else now, out[a]) + busy_s
        # The switch buffers messages for a busy receiver, so a busy receiver does not block the sender's port.
        received = into[b] = max(sent, into[b] + busy_s)
        return received + latency_s


class ModelledNetwork(SimulatedNetwork):
    """A `SimulatedNetwork` over `Links`, with contention at the ports.

    Args:
        clock: the clock that delivers messages.
        size: the number of learners.
        links: the cluster.
        model_bytes: the size that every non-empty payload counts as, so that a small model can stand for a large one; None: its
            real size.

    >>> clock = VirtualClock()
    >>> network = ModelledNetwork(clock, 8, Links(latency_s=1e-5, bandwidth_Bps=1e9, node_size=4))
    >>> network.kill(2, at=3.0); network.cut(0, 1, at=3.0); network.freeze(5, at=1.0, for_s=2.0)
    """

    def __init__(self, clock: VirtualClock, size: int, links: Links, model_bytes: float | None = None) -> None:
        super().__init__(clock, size, latency_s=links.latency_s, bandwidth_Bps=links.bandwidth_Bps)
        self.links, self.model_bytes = links, model_bytes
        self._ports = Ports(links)
        self._frozen_until: dict[int, float] = {}  # by rank
        self._half_collective_s = 0.0

    def counted(self, nbytes: float) -> float:
        """The size that a payload of `nbytes` counts as."""
        return self.model_bytes if self.model_bytes is not None and nbytes else nbytes

    def freeze(self, rank: int, at: float, for_s: float) -> None:
        """Delay all messages to and from learner `rank`, from virtual time `at` on for `for_s` seconds.

        Compute time is not changed: wrap it in `compute.frozen` too. Peers lose the learner if `for_s` > LOST_AFTER_S.
        """
        now = self.clock.now()
        self.clock.call_later(at - now, lambda: self._frozen_until.__setitem__(rank, at + for_s))
        if for_s > LOST_AFTER_S:
            reason = f"no heartbeat for {LOST_AFTER_S:g} s"
            self.clock.call_later(at - now + LOST_AFTER_S, lambda: self.lose(rank, reason))

    def deliver(
        self, sender: int, receiver: int, nbytes: int, action: Callable[[], None], *, streamed: bool = False
    ) -> None:
        """Queue at both ports, then run `action` on arrival, if both learners and the link are still alive."""
        now, counted = self.clock.now(), self.counted(nbytes)
        if nbytes:
            self.transports[sender].traffic.sent(receiver, int(counted))
        arrival = self._ports.arrival(sender, receiver, counted, now, streamed=streamed)
        self.clock.call_later(arrival - now, lambda: self._arrive(sender, receiver, int(counted), action))

    def _arrive(self, sender: int, receiver: int, nbytes: int, action: Callable[[], None]) -> None:
        thaw = max(self._frozen_until.get(sender, 0.0), self._frozen_until.get(receiver, 0.0)) - self.clock.now()
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
        """Join a collective, which takes the time of `Links.allreduce_s` and does not contend with messages."""
        allreduce_s = self.links.allreduce_s(self.counted(values.nbytes), members)
        self._half_collective_s = allreduce_s / (2 if source is None else 4)
        return super().gather(transport, values, members, source)

    def seconds(self, nbytes: int) -> float:
        """Half of the current collective's time, because the base class counts a collective as two messages."""
        return self._half_collective_s
