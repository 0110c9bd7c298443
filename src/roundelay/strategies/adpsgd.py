"""AD-PSGD (Lian et al. 2018; arXiv:2110.11199): pairs of learners average at any time, and no learner waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from roundelay.clock import Steps, done, first_of
from roundelay.cluster.membership import Membership
from roundelay.errors import PeerLostError, RefusedError, StrategyError
from roundelay.strategies.base import Strategy, fingerprint, mixing_over, spread
from roundelay.strategies.exchange_counts import ExchangeCounts
from roundelay.strategies.pair_average import PairAverage
from roundelay.strategies.partners import Partners
from roundelay.topology import Family, Mixing, family
from roundelay.transport.base import NO_CALLS, Request, Transport
from roundelay.weights.flat import NON_FINITE, Flat
from roundelay.weights.replica import Replica

DISAGREEMENT_EVERY = 8  # exchanges: |s_i - x_j| costs a pass over the weights
WIRE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class _Exchange:
    """An own call: the peer, and a future that is done once the reply was applied or has failed."""

    peer: int = -1
    over: Future[None] = field(default_factory=done)


class ADPSGD(Strategy):
    r"""$X \leftarrow X T_k - \alpha g(\Phi)$: gradients taken at stale weights $\Phi_i$ are applied to live ones.

    There are two sets of weights. Exchanges act on the **live** ones at any time; forward and backward read the module's
    own **working** ones, which never change in between. A step holds the lock of the live weights while the optimizer
    applies the gradient, taken at the old working weights, to the live ones. Then working <- live, by one copy.

    An exchange averages two learners in difference form, see `PairAverage`: the sum over all learners is conserved,
    whatever steps are taken meanwhile.

    With shards (FSDP2) each shard of a node exchanges on its own. The shards of a node step together, and rounds are counted by
    steps, so shards that call in the same step call the same node. A shard whose last call is still under way skips a step.
    So the last exchange of two shards of a node can be at most `max_lead` steps apart.

    Extra memory: live weights, the correction, and (unless the peers share memory) the request being served. An exchange
    with a silent peer is set aside; then there is a second correction.

    Args:
        topology: a name, a graph file, `module:function`, or a function from the number of learners to a Mixing. Its
            neighbours of round k say which peer is called; fixed ring: successor and predecessor in turn, random ring: the
            successor in the permutation of this round.
        max_lead: own steps since the last finished exchange, own or served, after which a learner waits for one.
        wire: "bfloat16" or "float16" halves what travels between machines; None sends weights as they are. Both ends apply
            the same rounded correction, so the sum is conserved all the same.
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
        self._request = Request(mirror.storage, self._live.pack, replica.wait_until_readable)
        self._corrections = [self._new_correction()]  # free: no exchange uses them
        self._exchange = self._aside = _Exchange()  # the last own one; an earlier one with a silent peer
        self._steps = 0
        self._counts = ExchangeCounts()
        self._disagreement2 = 0.0
        self._failure: BaseException | None = None  # raised in a thread of the transport
        transport.layout = self._live.wire_layout.code
        transport.serve(self._answer, self._undo)

    def _new_correction(self) -> Flat:
        return Flat(self._live.flat.views, self.transport.allocate)

    def reform(self, membership: Membership) -> None:
        """Ask the topology for these members. An exchange under way ends as it began."""
        self._partners.use(mixing_over(self._family, membership), membership)
        self.membership = membership

    def before_step(self) -> Steps:
        """Take the lock of the live weights; the optimizer works on them until `after_step`."""
        self.abandon()
        self._raise_failure()
        if self._counts.lead >= self.max_lead:
            yield from self._wait_for_an_exchange()
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
        if self._exchange.over.done():
            self._call_next()
        self.replica.follow(self._live.flat)
        yield from ()

    def _wait_for_an_exchange(self) -> Steps:
        """Wait until an own exchange has finished, or no peer is left to exchange with.

        The number of tries is bounded: a learner whose weights every peer refuses must go on and find that out.
        """
        for _ in range(2 * self.membership.size):
            if self._counts.lead < self.max_lead:
                return
            change = self._partners.change()  # before looking for silent peers, so that no change is missed
            if self._aside.over.done() and self._partners.is_silent(self._exchange.peer):
                self._aside, self._exchange = self._exchange, _Exchange()
            if self._exchange.over.done() and not self._call_next() and self._aside.over.done():
                return
            pending = [each.over for each in (self._exchange, self._aside) if not each.over.done()]
            if pending:
                yield first_of(change, *pending)
            self._raise_failure()

    def _call_next(self) -> bool:
        """Start an exchange with the next partner; False if there is none."""
        busy = None if self._aside.over.done() else self._aside.peer
        peer = self._partners.next(busy)
        if peer is None:
            return False
        self._counts.call_started(peer)
        exchange = self._exchange = _Exchange(peer, Future())
        correction = self._corrections.pop() if self._corrections else self._new_correction()
        reply = self.transport.call(peer, correction.storage, self._request)
        reply.add_done_callback(lambda reply: self._replied(reply, exchange, correction))
        return True

    def _replied(self, reply: Future[Tensor], exchange: _Exchange, correction: Flat) -> None:
        """End an own exchange. In a thread of the transport, or on the virtual clock."""
        try:
            self._take_reply(reply, exchange.peer, correction)
        except BaseException as error:  # a future swallows what its callbacks raise: the next step raises this
            self._failure = error
        finally:
            exchange.over.set_result(None)

    def _take_reply(self, reply: Future[Tensor], peer: int, correction: Flat) -> None:
        """x_i <- x_i - c, if the peer has replied."""
        try:
            self._apply(peer, reply.result())
        except RefusedError as error:
            self._count_failed()
            if error.reason == NON_FINITE:
                self._live.stop_narrowing()  # the correction may be too large for the wire dtype
            if reply.exception() is None:
                self.transport.refused.count(error.reason, f"a reply of learner {peer}")
        except PeerLostError as error:
            self._count_failed()
            if error.reason == NO_CALLS or peer in self.transport.lost:  # not if it has come back at another address
                self._partners.lose(peer)
            self.transport.free(correction.storage)  # a peer that is only frozen may still write to it
            return
        self._corrections.append(correction)

    def _count_failed(self) -> None:
        with self._live.lock:
            self._counts.failed += 1

    def _apply(self, peer: int, reply: Tensor) -> None:
        self._live.take(peer, reply)
        with self._live.lock:
            self._counts.finished += 1
            self._counts.exchanged()
        if self._counts.finished % DISAGREEMENT_EVERY == 1:
            self._disagreement2 = self._live.norm2(peer, reply)

    def _answer(self, peer: int, request: Tensor, reply: Tensor) -> None:
        """x_j <- x_j + c. In a thread of the transport."""
        self._live.answer(peer, request, reply)
        with self._live.lock:
            self._counts.served += 1
            self._counts.exchanged()

    def _undo(self, peer: int, reply: Tensor) -> None:
        """The caller never got c: taking c back conserves the sum."""
        self._live.undo(peer, reply)
        with self._live.lock:
            self._counts.served -= 1

    def drain(self) -> Steps:
        """Wait for the own exchanges, then working <- live."""
        self.abandon()
        yield self._exchange.over
        yield self._aside.over
        self._raise_failure()
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

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def peer_lost(self, peer: int, reason: str) -> None:
        """Go on without `peer`."""
        self._partners.lose(peer)

    def peer_silent(self, peer: int, *, silent: bool) -> None:
        """Call others than a silent peer; a step that waits for it sets that exchange aside."""
        self._partners.set_silent(peer, silent=silent)

    def abandon(self) -> None:
        """If the optimizer raised between the hooks, release the lock. The module gets what became of the step."""
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
            "spread": spread(self._disagreement2, self.membership.size),
            "peers_lost": len(self._partners.lost.intersection(self.membership.living)),
        }

    def state_dict(self) -> dict[str, Any]:
        """The round; live weights are the module's once drained."""
        return {"round": self._steps if self.rounds_by_step else self._partners.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in that round, with the weights that the module has now."""
        self._partners.round = self._steps = int(state["round"])
        if self._stepping:  # the last step raised, so the module has had the live weights themselves since then
            self.abandon()
            return
        with self._live.lock:
            self.replica.restart(self._live.flat)
