"""Local SGD with an outer step (DiLoCo, arXiv:2311.08105; NoLoCo, arXiv:2506.10911): weights travel once in H steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError
from roundelay.strategies.base import Strategy, fingerprint, mixing_over, spread
from roundelay.strategies.outer_loop import OuterLoop
from roundelay.strategies.outer_messages import COMPRESSIONS, OuterMessages
from roundelay.strategies.outer_weights import OuterWeights
from roundelay.topology import Family, Mixing, family
from roundelay.transport.base import Transport
from roundelay.weights import Replica


class LocalSGD(Strategy):
    r"""H local steps, then an outer step, then the mean of the outer weights $\phi$ over the neighbours of the round.

    $$\Delta_i = p_i - \phi_i, \quad m_i \leftarrow \mu m_i + \Delta_i, \quad
      y_i = \phi_i + \eta (\mu m_i + \Delta_i), \quad \phi_i \leftarrow \sum_j W_{ij} y_j, \quad p_i \leftarrow \phi_i$$

    with the module's weights $p_i$. The outer step is Nesterov's, as torch.optim.SGD writes it. All of this is linear,
    so the mean over all learners follows DiLoCo for any W. On the complete graph this *is* DiLoCo. On other graphs the
    replicas differ, and $W$ pulls them together at its own rate. (NoLoCo puts the pull $\sum_j W_{ij}\phi_j - \phi_i$ into the
    momentum. Then replicas on random pairs lose their disagreement more slowly, or never: see docs/strategies/local-sgd.md.)
    $\eta = 1, \mu = 0$ is plain local SGD; with one learner this is lookahead.

    A learner that comes to its outer step asks the neighbours of the round. They answer in the threads that serve calls, with
    the weights that they have then. So no learner waits for the computation of another one, only for messages: a slow
    learner takes fewer local steps in a round. The result of a round that a peer has begun is added to the module's
    weights after this learner's next step.

    Extra memory: five copies of the model in host memory, and one per neighbour during a round.

    Args:
        topology: a name, a graph file, `module:function`, or a function from the number of learners to a Mixing.
        every: H, the most local steps in a round.
        outer_lr: eta.
        outer_momentum: mu.
        overlap: take H more local steps while the messages of a round travel. Then its result comes one round later.
        compress: None sends weights as they are. "int8" takes a quarter of the bytes of float32, "top-k" a 16th; "top-k"
            needs the complete graph.
    """

    synchronous = False
    mixes_weights = False
    uses_collectives = False
    reforms_alone = True

    def __init__(
        self,
        topology: str | Mixing | Family = "complete",
        every: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        *,
        overlap: bool = False,
        compress: Literal["int8", "top-k"] | None = None,
    ) -> None:
        if every < 1:
            raise StrategyError(f"every must be at least 1 step, got {every}")
        if outer_lr <= 0 or not 0 <= outer_momentum < 1:
            raise StrategyError(
                f"outer_lr must be above 0 and outer_momentum from 0 to below 1, got {outer_lr:g} and {outer_momentum:g}"
            )
        if compress not in COMPRESSIONS:
            raise StrategyError(f"compress must be None, 'int8' or 'top-k', got {compress!r}")
        self.every, self.outer_lr, self.outer_momentum = every, outer_lr, outer_momentum
        self.overlap, self.compress = overlap, compress
        self._family = family(topology)
        self._stepping = False

    def agreement(self, size: int, local_size: int) -> str:
        """The graph, and all settings."""
        settings = (self.every, self.outer_lr, self.outer_momentum, self.overlap, self.compress)
        return f"{super().agreement(size, local_size)} {settings} {fingerprint(self._family(size))}"

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Begin with phi = p, and serve the rounds of peers."""
        super().attach(replica, transport, membership)
        outer = OuterWeights(replica, self.outer_lr, self.outer_momentum)
        self._messages = OuterMessages(self.compress, outer.phi, in_step=membership.generation == 0)
        self._use(membership)
        transport.layout = outer.phi.layout.code
        # Shards of a node must begin a round at the same step, so they do not begin it when a peer asks.
        begins_for_peers = not self.rounds_by_step
        self._loop = OuterLoop(
            transport, outer, self._messages, self._row, self._knows, begins_for_peers=begins_for_peers
        )

    def _use(self, membership: Membership) -> None:
        self._mixing = mixing_over(self._family, membership)
        self._position = membership.position(self.transport.rank)
        everyone = len(self._mixing.row(self._position, 0)) == membership.size
        if self.compress == "top-k" and not everyone:
            raise StrategyError(
                f"compress='top-k' sends changes of weights that all learners share, so the topology must be complete, got "
                f"{self._mixing!r}; use compress='int8'"
            )
        self.membership = membership

    def _row(self, round: int) -> dict[int, float]:
        """W_ij of a round by learner, in the order of ranks."""
        row = self._mixing.row(self._position, round)
        return {self.membership.living[position]: weight for position, weight in sorted(row.items())}

    def _knows(self, peer: int) -> bool:
        return peer in self.membership.living

    def reform(self, membership: Membership) -> None:
        """Ask the topology for these members. The round under way is not affected."""
        with self._loop.lock:
            self._use(membership)
            self._messages.in_step = False

    # Steps -----------------------------------------------------------------------------------------------------------

    def before_step(self) -> Steps:
        """Keep other threads from reading the module's weights until `after_step`."""
        self.abandon()
        self._loop.check()
        self._loop.lock.acquire()
        self._stepping = True
        yield from ()

    def after_step(self) -> Steps:
        """Bring in the result of a round that has ended; begin a round if this was the last local step."""
        self._loop.steps += 1
        self.abandon()
        if not self._loop.late:
            self._loop.bring_in()
        if self._loop.steps >= self.every:
            yield from self._loop.settle()  # the last round with `overlap`, or one that a peer has asked for
            self._loop.begin(late=self.overlap)
            if not self.overlap:
                yield from self._loop.settle()
                if self._loop.peers_wait:
                    self._loop.begin(late=False)

    # The end, peers ----------------------------------------------------------------------------------------------------

    def drain(self) -> Steps:
        """Wait for the round under way; the module has its result then."""
        self.abandon()
        yield from self._loop.drain()

    def finish(self) -> Steps:
        """Take part in no more rounds; the module has its own local steps since the last one."""
        yield from self.drain()
        self._loop.rounds.leave()
        yield from self._loop.settle()  # a round that a peer has asked for meanwhile

    def peer_lost(self, peer: int, reason: str) -> None:
        """Go on without `peer`."""
        self._loop.rounds.lose(peer)

    def peer_silent(self, peer: int, *, silent: bool) -> None:
        """Leave a silent peer out of rounds."""
        self._loop.rounds.set_silent(peer, silent=silent)

    def abandon(self) -> None:
        """The optimizer's step has ended or has raised: other threads may read the module's weights again."""
        if self._stepping:
            self._stepping = False
            self._loop.lock.release()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """The module's weights, between two steps."""
        with self._loop.lock:
            yield None

    def metrics(self) -> dict[str, float]:
        """Rounds, local steps and bytes of the last one, neighbours left out, exchanges by peer, and the last spread.

        The next round measures the spread again.
        """
        self._messages.measure = True
        return self._loop.metrics() | {"spread": spread(self._messages.disagreement2, self.membership.size)}

    def state_dict(self) -> dict[str, Any]:
        """Once drained: the round, the local steps, phi, m, and what compression has left out."""
        return self._loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there, with the weights that the module has now. All learners do so before their next step."""
        self._loop.load_state_dict(state)
