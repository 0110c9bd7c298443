"""AD-PSGD (Lian et al. 2018; arXiv:2110.11199): pairs average at any time, and nobody waits for anybody."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from typing import Any

from torch import Tensor

from roundelay.clock import Steps, first_of
from roundelay.cluster.membership import Membership
from roundelay.errors import PeerLostError, RefusedError, StrategyError
from roundelay.strategies.base import Strategy, check_size, flat_with_shadow
from roundelay.strategies.dpsgd import spread
from roundelay.strategies.pair_average import PairAverage
from roundelay.topology import Mixing
from roundelay.transport.base import Request, Transport
from roundelay.weights.replica import NON_FINITE, Flat, Replica

log = logging.getLogger("roundelay")

ROUNDS_AHEAD = 8  # whose partners are known before they begin
DISAGREEMENT_EVERY = 8  # exchanges: |s_i - x_j| costs a pass over the weights


class _Exchange:
    """An own call: with whom, and whether it is over. A future is made only for who waits for that: it costs as much as a step.

    `finish` and `end` may come from two threads at once; each looks after it has written, so that one of them sees both.
    """

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.over = False
        self._end: Future[None] | None = None

    @classmethod
    def none(cls) -> _Exchange:
        """What has been over ever since."""
        none = cls(peer=-1)
        none.over = True
        return none

    def finish(self) -> None:
        """It is over, whatever has become of it."""
        self.over = True
        self._wake()

    def end(self) -> Future[None]:
        """Done when it is over."""
        if self._end is None:
            self._end = Future()
        if self.over:
            self._wake()
        return self._end

    def _wake(self) -> None:
        if self._end is not None:
            with contextlib.suppress(InvalidStateError):  # both threads have come here
                self._end.set_result(None)


class _Seat:
    """A learner's place in a mixing that is laid over the living."""

    def __init__(self, mixing: Mixing, living: tuple[int, ...], position: int) -> None:
        self.mixing, self.living, self.position = mixing, living, position
        self._ahead: tuple[int, list[int | None]] = 0, []  # the partners of some rounds, and the first of those

    def partner(self, round: int) -> int | None:
        """Whom it calls in a round."""
        first, partners = self._ahead
        if not first <= round < first + len(partners):
            self.look_ahead(round)
            first, partners = self._ahead
        return partners[round - first]

    def look_ahead(self, round: int) -> None:
        """Find the partners of some rounds from here on, unless they are known. In any thread: the step has no time for it."""
        first, partners = self._ahead
        if not first <= round <= first + len(partners) - ROUNDS_AHEAD:
            positions = [self.mixing.partner(self.position, round + k) for k in range(2 * ROUNDS_AHEAD)]
            self._ahead = round, [None if position is None else self.living[position] for position in positions]


class ADPSGD(Strategy):
    r"""$X \leftarrow X T_k - \alpha g(\Phi)$: gradients taken at stale weights $\Phi_i$ are applied to live ones.

    Two sets of weights. Exchanges act on the **live** ones at any time; forward and backward read the module's own
    **working** ones, which never change between them. The step holds the live lock: the optimizer applies the gradient,
    taken at the old working weights, to the live ones. Then working <- live: a copy, or, where memory can be there twice
    (`Shadow`), the flat that the optimizer has worked on, beside which exchanges go on in another.

    An exchange is pairwise averaging in difference form. The caller sends what its live weights are, $s_i$; the answering
    side computes $d = s_i - x_j$ once, adds $d/2$ to its own live weights and replies with d; the caller subtracts that
    very $d/2$, however late it comes. Both apply the same rounded numbers, so the sum over learners is conserved whatever
    steps are taken meanwhile; for the same reason $s_i$ need not be of one instant, and is read without a lock.

    Over sockets float32 numbers travel in half precision: $s_i$ is rounded before it is sent, with an error of at most
    $2^{-11}$ of each weight, and d once before either end applies it. So the sum is conserved as before, and what rounding
    adds to the spread is far below the noise of gradients. Numbers that do not fit go in full.

    Extra memory: live weights, the difference and (unless the transport shares memory) the request being served; once an
    exchange was set aside, another difference.

    Args:
        mixing: its neighbours of round k say who may be called; fixed ring: successor and predecessor in turn, random
            ring: the successor in this round's permutation.
        max_lead: own steps since the last finished exchange, own or served, after which a learner waits for one; not with
            a peer that is not heard for a while: that exchange is set aside, and another neighbour called.
        full_precision: send float32 numbers as they are.
    """

    synchronous = False

    def __init__(self, mixing: Mixing, max_lead: int = 16, *, full_precision: bool = False) -> None:
        if max_lead < 1:
            raise StrategyError(f"max_lead must be at least 1 step, got {max_lead}")
        self.mixing, self.max_lead, self.full_precision = mixing, max_lead, full_precision
        self.round = 0
        self._gone: set[int] = set()
        self._quiet: set[int] = set()  # not heard for a while
        self._stir: Future[None] = Future()  # done when that has changed
        self._stepping = self._alone = False

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Publish the live weights and serve."""
        check_size(self.mixing, membership)
        super().attach(replica, transport, membership)
        self._lay(self.mixing, membership)
        flat = flat_with_shadow(replica.tensors(), transport)
        replica.copy_to(flat)
        other = flat_with_shadow(flat.views, transport) if replica.can_show(flat) else None
        self._live = PairAverage(flat, other, full_precision=self.full_precision)
        self._lock = self._live.lock  # guards the counts below, too
        self._difference = Flat(flat.views, transport.allocate)
        transport.layout = flat.layout.code
        self._exchange = self._aside = _Exchange.none()  # the last one; one that takes long
        self._failure: BaseException | None = None  # what went wrong in the background
        self._spare: Flat | None = None
        self._steps = self._started = self._finished = self._served = self._failed = 0
        self._lead = self._largest_lead = self._since_read = 0
        self._staleness_sum = self._staleness_max = 0
        self._disagreement2 = 0.0
        self._edges: defaultdict[int, int] = defaultdict(int)
        transport.on_lost(lambda peer, reason: self._live.forget())
        transport.serve(self._answer, self._take_back)

    def _lay(self, mixing: Mixing, membership: Membership) -> None:
        """Lay the mixing over the living; what `_next_peer` reads is replaced in one go."""
        self.mixing, self.membership = mixing, membership
        self._seat = _Seat(mixing, membership.living, membership.position(self.transport.rank))

    def reform(self, mixing: Mixing, membership: Membership) -> None:
        """Lay the new mixing over the living, between two exchanges."""
        check_size(mixing, membership)
        with self._lock:
            self._gone.difference_update(membership.living)  # who is gone all the same is found out by the next call
            self._alone = False
            self._lay(mixing, membership)

    def before_step(self) -> Steps:
        """Under the live lock until after_step: the optimizer works on the live weights."""
        self.abandon()
        if self._failure is not None:
            raise self._failure
        if self._lead >= self.max_lead:
            yield from self._wait_for_an_exchange()
        self._lock.acquire()
        self._stepping = True
        self._staleness_sum += self._since_read
        self._staleness_max = max(self._staleness_max, self._since_read)
        self.replica.lend(self._live.for_step())

    def _wait_for_an_exchange(self) -> Steps:
        """Until one has finished, own or served; not longer than somebody is left to exchange with."""
        for _ in range(2 * self.mixing.size):  # no more: who is refused by all must find out that its weights are bad
            if self._lead < self.max_lead:
                return
            stir = self._stir = Future()  # before looking at who is quiet; a new one, or it would remember every wait
            if not self._exchange.over and self._aside.over and self._exchange.peer in self._quiet:
                self._set_aside()
            if self._exchange.over and not self._exchange_again() and self._aside.over:
                return
            pending = [each.end() for each in (self._exchange, self._aside) if not each.over]
            if pending:
                yield first_of(stir, *pending)
            if self._failure is not None:
                raise self._failure

    def after_step(self) -> Steps:
        """Start an exchange with the next neighbour, unless one is under way; working <- live.

        If that takes a copy, it needs no lock: working weights need not be of one instant, either, and exchanges would wait for
        half a step's time.
        """
        flat = self._live.flat
        behind = self._end_step()
        self._steps += 1
        self._lead += 1
        self._largest_lead = max(self._largest_lead, self._lead)
        self._since_read = 0
        peer = self._next_peer() if self._exchange.over else None
        request = Request(flat.storage, self._live.pack)
        self._stepping = False
        self._lock.release()
        if peer is not None:
            self._call(peer, request)
        if behind:
            self.replica.copy_from(flat)
        yield from ()

    def _end_step(self) -> bool:
        """The live weights have what the optimizer has made; True if the module's are behind."""
        behind = self.replica.take_back(self._live.flat)
        if not self._avoid_shown():
            self._live.stay()
        return behind

    def _avoid_shown(self) -> bool:
        """Let exchanges act elsewhere than on what the module shows."""
        if self.replica.shown is not self._live.flat:
            return False
        self._live.go_on_elsewhere()
        return True

    def _exchange_again(self) -> bool:
        """After an exchange that came to nothing, ask the next neighbour; False if none is left."""
        peer = self._next_peer()
        if peer is None:
            return False
        with self._lock:
            request = Request(self._live.whole().storage, self._live.pack)
        self._call(peer, request)
        return True

    def _set_aside(self) -> None:
        """Let an exchange with somebody who is not heard end when it may; the next one has a buffer of its own.

        Only then: whoever corrects the same difference by two exchanges at a time overshoots.
        """
        self._aside, self._exchange = self._exchange, _Exchange.none()
        spare = self._spare or Flat(self._difference.views, self.transport.allocate)
        self._difference, self._spare = spare, self._difference

    def _call(self, peer: int, request: Request) -> None:
        self._started += 1
        self._edges[peer] += 1
        exchange = self._exchange = _Exchange(peer)
        reply = self.transport.call(peer, self._difference.storage, request)
        reply.add_done_callback(lambda reply: self._replied(reply, exchange))

    def _next_peer(self) -> int | None:
        """The living neighbour of the next own round that has one; None if none is left."""
        seat = self._seat
        busy = None if self._aside.over else self._aside.peer
        for _ in range(2 * seat.mixing.size):
            peer = seat.partner(self.round)
            self.round += 1
            if peer is not None and peer != busy and peer not in self._gone and peer not in self._quiet:
                return peer
        if len(seat.living) > 1 and not self._alone and busy is None and not self._quiet:
            self._alone = True
            log.warning("learner %d has no neighbour left to exchange with and goes on alone", self.transport.rank)
        return None

    def _answer(self, peer: int, request: Tensor, reply: Tensor) -> None:
        """Meet the peer in the middle. In some thread of the transport."""
        self._live.answer(peer, request, reply)
        with self._lock:
            self._served += 1
            self._exchanged()

    def _take_back(self, peer: int, reply: Tensor) -> None:
        """The caller never got d, so taking it back keeps the sum."""
        self._live.take_back(peer, reply)
        with self._lock:
            self._served -= 1

    def _replied(self, reply: Future[Tensor], exchange: _Exchange) -> None:
        """x_i <- x_i - d/2. In some thread of the transport, or on the virtual clock."""
        try:
            self._apply_reply(exchange.peer, reply.result())
        except RefusedError as error:
            self._failed += 1
            self._live.full_precision |= error.reason == NON_FINITE  # a difference may be larger than float16 knows
            if reply.exception() is None:
                self.transport.refused.count(error.reason, f"a reply of learner {error.peer}")
        except PeerLostError as error:
            self._failed += 1
            self._gone.add(error.peer)
        except BaseException as error:  # a future swallows what its callbacks raise: hand it to the training thread
            self._failure = error
        self._seat.look_ahead(self.round)
        exchange.finish()

    def _apply_reply(self, peer: int, reply: Tensor) -> None:
        self._live.take(peer, reply)
        with self._lock:
            self._finished += 1
            self._exchanged()
        if self._finished % DISAGREEMENT_EVERY == 1:
            self._disagreement2 = self._live.norm2(peer, reply)
        self._live.tidy()

    def _exchanged(self) -> None:
        self._lead = 0
        self._since_read += 1

    def drain(self) -> Steps:
        """Wait for the own exchanges, and show the live weights to the module."""
        self.abandon()
        yield self._exchange.end()
        yield self._aside.end()
        if self._failure is not None:
            raise self._failure
        self._show()

    def before_saving(self) -> Steps:
        """The live weights as they are: a peer that does not answer must not hold up what is saved."""
        self.abandon()
        self._show()
        yield from ()

    def finish(self) -> Steps:
        """The module ends with the live weights."""
        yield from self.drain()
        self.transport.serve(None)
        self._show()

    def _show(self) -> None:
        """Working <- live."""
        with self._lock:
            self.replica.copy_from(self._live.whole())
            self._avoid_shown()
            self._since_read = 0

    def lost(self, peer: int, reason: str) -> None:
        """Go on without `peer`."""
        self._gone.add(peer)
        self._quiet.discard(peer)

    def unheard(self, peer: int, quiet: bool) -> None:  # noqa: FBT001  # a listener
        """Wait for nobody who is not heard; whoever waits looks again."""
        (self._quiet.add if quiet else self._quiet.discard)(peer)
        stir, self._stir = self._stir, Future()
        stir.set_result(None)

    def abandon(self) -> None:
        """If the last step raised between the hooks, the lock is still held: release it, and show what became of the step."""
        if self._stepping:
            flat = self._live.flat
            try:
                if self._end_step():
                    self.replica.copy_from(flat)
            finally:
                self._since_read = 0
                self._stepping = False
                self._lock.release()

    def weights(self) -> Flat:
        """The live weights, to be read."""
        if self._stepping:
            return self._live.flat
        with self._lock:
            return self._live.whole()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[Flat]:
        """The live weights, between two steps and exchanges: nothing changes them, or the optimizer's state, in this block."""
        with self._lock:
            yield self._live.whole()

    def metrics(self) -> dict[str, float]:
        """Exchanges, staleness (exchanges applied between reading weights and applying their gradient), lead, spread."""
        steps = max(self._steps, 1)
        return {
            "exchanges_started": self._started,
            "exchanges_finished": self._finished,
            "exchanges_served": self._served,
            "exchanges_failed": self._failed,
            "exchanges_per_step": self._started / steps,
            "staleness_mean": self._staleness_sum / steps,
            "staleness_max": self._staleness_max,
            "lead": self._lead,
            "lead_max": self._largest_lead,
            "spread": spread(self._disagreement2, self.membership.size),
            "peers_lost": len(self._gone.intersection(self.membership.living)),
        } | {f"exchanges_with_{peer}": count for peer, count in sorted(self._edges.items())}

    def state_dict(self) -> dict[str, Any]:
        """The round; live weights are the module's once drained."""
        return {"round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in that round, with the weights that the module has now."""
        self.round = int(state["round"])
        if self._stepping:  # the last step raised, so the module has had the live weights themselves since then
            self.abandon()
            return
        with self._lock:
            self.replica.copy_to(self._live.for_step())
            self._avoid_shown()
