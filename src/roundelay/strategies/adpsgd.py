"""AD-PSGD (Lian et al. 2018; arXiv:2110.11199): pairs of learners average at any time, and no learner waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError
from roundelay.strategies.base import Strategy, fingerprint, mixing_over, spread
from roundelay.strategies.exchange_counts import ExchangeCounts
from roundelay.strategies.own_exchanges import OwnExchanges
from roundelay.strategies.pair_average import PairAverage
from roundelay.strategies.pair_exchange import AnsweringEnd
from roundelay.strategies.partners import Partners
from roundelay.topology import Family, Mixing, family
from roundelay.transport.base import Transport
from roundelay.weights.flat import Flat
from roundelay.weights.replica import Replica

WIRE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class ADPSGD(Strategy):
    r"""$X \leftarrow X T_k - \alpha g(\Phi)$: gradients taken at stale weights $\Phi_i$ are applied to live ones.

    There are two sets of weights. Exchanges act on the **live** ones at any time; forward and backward read the module's
    own **working** ones, which do not change between two steps. A step holds the lock of the live weights while the optimizer
    applies the gradient, taken at the old working weights, to the live ones. Then working <- live, by one copy.

    An exchange averages two learners in difference form, see `PairAverage`: the sum over all learners is conserved,
    whatever steps are taken meanwhile.

    With shards (FSDP2) each shard of a node exchanges on its own. The shards of a node step together, and rounds are counted by
    steps, so shards that call in the same step call the same node. A shard whose last call is still under way skips a step.
    So the last exchanges of two shards of a node are at most `max_lead` steps apart.

    Extra memory: live weights, the difference, and (unless the peers share memory) the request being served. An exchange
    with a silent peer is set aside; then there is a second difference.

    Args:
        topology: a name, a graph file, `module:function`, or a function from the number of learners to a Mixing. Its
            neighbours of round k say which peer is called; fixed ring: successor and predecessor in turn, random ring: the
            successor in the permutation of this round.
        max_lead: own steps since the last finished exchange, own or served, after which a learner waits for one.
        wire: "bfloat16" or "float16" halves what travels between machines; None sends weights as they are. Both ends apply
            the same rounded difference, so the sum is conserved all the same.
    """

    synchronous = False
    uses_collectives = False
    reforms_alone = True

    def __init__(
        self,
        topology: str | Mixing | Family = "random-ring",
        max_lead: int = 16,
        *,
        wire: Literal["float16", "bfloat16"] | None = None,
    ) -> None:
        if max_lead < 1:
            raise StrategyError(f"max_lead must be at least 1 step, got {max_lead}")
        if wire is not None and wire not in WIRE_DTYPES:
            raise StrategyError(f"wire must be None, 'float16' or 'bfloat16', got {wire!r}")
        self.max_lead, self.wire = max_lead, wire
        self._family = family(topology)
        self._stepping = False

    def agreement(self, size: int, local_size: int) -> str:
        """The graph, and how weights travel."""
        return f"{super().agreement(size, local_size)} {self.wire} {fingerprint(self._family(size))}"

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Publish the live weights and serve exchanges."""
        super().attach(replica, transport, membership)
        self._partners = Partners(transport.rank)
        self._partners.use(mixing_over(self._family, membership), membership)
        mirror = replica.mirror(transport.allocate)
        self._live = PairAverage(replica, mirror, WIRE_DTYPES[self.wire] if self.wire else None)
        self._counts = ExchangeCounts()
        self._own = OwnExchanges(self._live, transport, self._partners, self._counts)
        self._steps = 0
        transport.layout = self._live.wire_layout.code
        transport.serve(self._answer)

    @contextlib.contextmanager
    def _answer(self, peer: int, request: Tensor, reply: Tensor) -> Iterator[AnsweringEnd]:
        """A peer asks for an exchange. In a thread of the transport."""
        with self._live.answer(peer, request, reply) as end:
            yield end
        with self._live.lock:
            self._counts.served += 1
            self._counts.exchanged()
        self._partners.report_change()  # a step may wait for an exchange

    def reform(self, membership: Membership) -> None:
        """Ask the topology for these members. An exchange under way is not affected."""
        self._partners.use(mixing_over(self._family, membership), membership)
        self.membership = membership

    def before_step(self) -> Steps:
        """Take the lock of the live weights; the optimizer works on them until `after_step`."""
        self.abandon()
        self._own.raise_failure()
        yield from self._own.wait_for_lead(self.max_lead, tries=2 * self.membership.size)
        self._live.lock.acquire()
        self._stepping = True
        self._counts.step_begins()
        self.replica.begin_step(self._live.flat)

    def after_step(self) -> Steps:
        """Release the live weights, call the next neighbour unless a call is under way, then working <- live.

        The copy needs no lock, since working weights need not be of one instant.
        """
        self.replica.end_step(self._live.flat)
        self._counts.step_ends()
        self._stepping = False
        self._live.lock.release()
        self._steps += 1
        if self.rounds_by_step:
            self._partners.round = self._steps
        self._own.start_unless_under_way()
        self.replica.follow(self._live.flat)
        yield from ()

    def drain(self) -> Steps:
        """Wait for the own exchanges, then working <- live."""
        self.abandon()
        yield from self._own.drain()
        self._update_working_weights()

    def before_saving(self) -> Steps:
        """Save the live weights as they are: a peer that does not answer must not delay a checkpoint."""
        self.abandon()
        self._update_working_weights()
        yield from ()

    def finish(self) -> Steps:
        """Stop serving; the module ends with the live weights."""
        yield from self.drain()
        self.transport.serve(None)
        self._update_working_weights()

    def _update_working_weights(self) -> None:
        with self._live.lock:
            self.replica.copy_from(self._live.flat)
            self._counts.weights_read()

    def peer_lost(self, peer: int, reason: str) -> None:
        """Go on without `peer`."""
        self._partners.lose(peer, reason)

    def peer_silent(self, peer: int, *, silent: bool) -> None:
        """Do not call a silent peer. A step that waits for an exchange with that peer sets the exchange aside."""
        self._partners.set_silent(peer, silent=silent)

    def abandon(self) -> None:
        """If the optimizer raised between the hooks, release the lock. The module gets the weights after that step."""
        if self._stepping:
            try:
                self.replica.end_step(self._live.flat)
                self.replica.copy_from(self._live.flat)
                self._counts.weights_read()
            finally:
                self._stepping = False
                self._live.lock.release()

    def weights(self) -> Flat:
        """The live weights, to be read."""
        self.replica.wait_until_readable()
        return self._live.flat

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[Flat]:
        """The live weights, between two steps and exchanges."""
        with self._live.lock:
            yield self.weights()

    def metrics(self) -> dict[str, float]:
        """Exchanges, staleness, lead, spread."""
        return self._counts.metrics() | {
            "spread": spread(self._own.disagreement2, self.membership.size),
            "peers_lost": len(self._partners.lost.intersection(self.membership.living)),
        }

    def state_dict(self) -> dict[str, Any]:
        """The round; live weights are the module's once drained."""
        return {"round": self._steps if self.rounds_by_step else self._partners.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in that round, with the weights that the module has now."""
        self._partners.round = self._steps = int(state["round"])
        if self._stepping:  # the last step raised, so the parameters may still be views of the live weights
            self.abandon()
            return
        with self._live.lock:
            self.replica.restart(self._live.flat)
