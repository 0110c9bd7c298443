"""Local SGD with an outer step (DiLoCo, arXiv:2311.08105; NoLoCo, arXiv:2506.10911): weights travel once in H steps."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Literal

from roundelay.clock import Steps, done
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError
from roundelay.strategies.base import Strategy, fingerprint, mixing_over, spread
from roundelay.strategies.outer_messages import COMPRESSIONS, OuterMessages
from roundelay.strategies.outer_rounds import OuterRounds
from roundelay.strategies.outer_weights import OuterWeights
from roundelay.topology import Family, Mixing, family
from roundelay.transport.base import Transport
from roundelay.weights import Replica
from roundelay.weights.flat import NON_FINITE


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
        self._outer = OuterWeights(replica, self.outer_lr, self.outer_momentum)
        self._messages = OuterMessages(self.compress, self._outer.phi, in_step=membership.generation == 0)
        self._lock = threading.RLock()  # guards both of the above, and the module's weights while they change
        self._under_way = False
        self._late = False  # bring the result in at the next own round, not as soon as it is here
        self._steps = self._steps_before = 0  # since the round began: own steps, and those of the round before
        self._mixed: Future[None] = done()
        self._failure: BaseException | None = None  # raised in a thread of the transport
        self._left_out = 0
        self._exchanges: Counter[int] = Counter()
        self._use(membership)
        transport.layout = self._outer.phi.layout.code
        self._rounds = OuterRounds(transport, self._asked)

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

    def reform(self, membership: Membership) -> None:
        """Ask the topology for these members. The round under way is not affected."""
        with self._lock:
            self._use(membership)
            self._messages.in_step = False

    # Steps -----------------------------------------------------------------------------------------------------------

    def before_step(self) -> Steps:
        """Keep other threads from reading the module's weights until `after_step`."""
        self.abandon()
        self._raise_failure()
        self._lock.acquire()
        self._stepping = True
        yield from ()

    def after_step(self) -> Steps:
        """Bring in the result of a round that has ended; begin a round if this was the last local step."""
        self._steps += 1
        self.abandon()
        if not self._late:
            self._shift()
        if self._steps >= self.every:
            yield from self._settle()  # the last round with `overlap`, or one that a peer has asked for
            self._begin(late=self.overlap)
            if not self.overlap:
                yield from self._settle()

    def _asked(self) -> None:
        """A peer waits for this learner in the next round. In a thread of the transport."""
        if not self.rounds_by_step:  # shards of a node must begin a round at the same step
            self._begin(late=False)

    def _begin(self, *, late: bool) -> None:
        """Take the outer step and send y, unless a round is under way."""
        with self._lock:
            if self._under_way:
                return
            self._under_way, self._late = True, late
            self._outer.step()
            self._steps_before, self._steps = self._steps, 0
            round = self._rounds.state.next_round
            row = self._mixing.row(self._position, round)
            self._row = {self.membership.living[position]: weight for position, weight in sorted(row.items())}
            message = self._messages.encode(self._outer.y, self._outer.phi)
            mixed = self._mixed = Future()
        ended = self._rounds.begin(round, self._row.keys() - {self.transport.rank}, message)
        ended.add_done_callback(lambda _: self._ended(mixed))

    def _ended(self, mixed: Future[None]) -> None:
        """All messages are here: mix. In a thread of the transport, or on the virtual clock."""
        try:
            with self._lock:
                self._mix()
                self._under_way = False
        except BaseException as error:  # a future swallows what its callbacks raise: the next step raises this
            self._failure = error
        finally:
            mixed.set_result(None)
        if self._failure is None and self._rounds.state.wanted:
            self._asked()

    def _mix(self) -> None:
        """Phi <- sum_j W_ij y_j."""
        outer, received = self._outer, self._rounds.state.received
        mixed = self._messages.mix(self._row, self.transport.rank, received, outer.y, outer.phi)
        outer.mixed()
        for peer in self._messages.refused:
            self.transport.refused.count(NON_FINITE, f"a message of learner {peer}")
        self._left_out += len(self._row) - 1 - len(mixed)
        self._exchanges.update(mixed)

    def _shift(self) -> None:
        """Bring the result of a round that has ended into the module."""
        with self._lock:
            self._outer.shift(moved=self._steps > 0)

    def _settle(self) -> Steps:
        """Wait for the round under way, and bring its result in."""
        while not self._mixed.done():  # a peer may ask for the next round at once
            yield self._mixed
        self._raise_failure()
        self._shift()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The end, peers ----------------------------------------------------------------------------------------------------

    def drain(self) -> Steps:
        """Wait for the round under way; the module has its result then."""
        self.abandon()
        yield from self._settle()

    def finish(self) -> Steps:
        """Take part in no more rounds; the module has its own local steps since the last one."""
        yield from self.drain()
        self._rounds.leave()
        yield from self._settle()  # a round that a peer has asked for meanwhile

    def peer_lost(self, peer: int, reason: str) -> None:
        """Go on without `peer`."""
        self._rounds.lose(peer)

    def peer_silent(self, peer: int, *, silent: bool) -> None:
        """Leave a silent peer out of rounds."""
        self._rounds.set_silent(peer, silent=silent)

    def abandon(self) -> None:
        """The optimizer's step has ended or has raised: other threads may read the module's weights again."""
        if self._stepping:
            self._stepping = False
            self._lock.release()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """The module's weights, between two steps."""
        with self._lock:
            yield None

    def metrics(self) -> dict[str, float]:
        """Rounds, the local steps of the last one, bytes of a message, neighbours left out, and the spread seen last.

        The next round measures the spread again.
        """
        self._messages.measure = True
        return {
            "rounds": self._rounds.state.round + 1,
            "local_steps": self._steps_before,
            "message_bytes": self._messages.nbytes,
            "neighbours_left_out": self._left_out,
            "spread": spread(self._messages.disagreement2, self.membership.size),
        } | {f"exchanges_with_{peer}": count for peer, count in sorted(self._exchanges.items())}

    def state_dict(self) -> dict[str, Any]:
        """Once drained: the round, the local steps, phi, m, and what compression has left out."""
        with self._lock:
            counts = {"round": self._rounds.state.round, "steps": self._steps}
            return counts | self._outer.state_dict() | {"messages": self._messages.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there, with the weights that the module has now. All learners do so before their next step."""
        with self._lock:
            self._rounds.state.round, self._steps = int(state["round"]), int(state["steps"])
            self._outer.load_state_dict(state)
            self._messages.load_state_dict(state["messages"])
