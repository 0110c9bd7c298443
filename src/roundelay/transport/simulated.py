"""All learners in one process on a virtual clock: deterministic, with latency, bandwidth and faults on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from roundelay.clock import VirtualClock
from roundelay.errors import PeerLostError, RefusedError, RoundelayError
from roundelay.transport.base import GAVE_UP, LEFT, NO_CALLS, Address, Handler, Request, Transport, Undo
from roundelay.transport.heartbeats import LOST_AFTER_S, NO_HEARTBEAT, SILENT_AFTER_S

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
        self._collectives: dict[Collective, _Gathering] = {}

    def seconds(self, nbytes: int) -> float:
        """Time of one message."""
        return self.latency_s + nbytes / self.bandwidth_Bps

    def kill(self, rank: int, at: float) -> None:
        """Learner `rank` is gone from time `at`; the others notice at once, as with a closed connection."""
        self.clock.call_later(at - self.clock.now(), lambda: self.lose(rank, "its process ended"))

    def cut(self, a: int, b: int, at: float) -> None:
        """Nothing passes between `a` and `b` from time `at`; both notice when heartbeats are missing."""
        now = self.clock.now()
        self.clock.call_later(at - now, lambda: self._cut.add(frozenset((a, b))))
        self.clock.call_later(at - now + SILENT_AFTER_S, lambda: self._tell_silent(a, b))
        self.clock.call_later(at - now + LOST_AFTER_S, lambda: self.transports[a].lose(b, NO_HEARTBEAT))
        self.clock.call_later(at - now + LOST_AFTER_S, lambda: self.transports[b].lose(a, NO_HEARTBEAT))

    def _tell_silent(self, a: int, b: int) -> None:
        silent = frozenset((a, b)) in self._cut
        self.transports[a]._tell_silent(b, silent=silent)
        self.transports[b]._tell_silent(a, silent=silent)

    def mend(self, a: int, b: int, at: float) -> None:
        """The link between `a` and `b` works again from time `at`; each admits the other, unless that one has gone."""

        def mended() -> None:
            self._cut.discard(frozenset((a, b)))
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

    def deliver(self, sender: int, receiver: int, nbytes: int, action: Callable[[], None]) -> None:
        """Run `action` at the receiver when the message arrives, if both ends and the link still work then.

        What a learner sent before it left in order still arrives.
        """
        source, target = self.transports[sender], self.transports[receiver]
        source.traffic.sent(receiver, nbytes)

        def arrive() -> None:
            if not target.gone and (source.left or not source.gone) and frozenset((sender, receiver)) not in self._cut:
                target.traffic.received(nbytes)
                action()

        self.clock.call_later(self.seconds(nbytes), arrive)

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


class _Swap:
    """A swap under way: done once every incoming buffer is full."""

    def __init__(self, incoming: Mapping[int, Tensor], future: Future[None]) -> None:
        self.missing = dict(incoming)
        self.future = future

    def fill(self, peer: int, payload: Tensor) -> None:
        self.missing.pop(peer).copy_(payload)
        if not self.missing and not self.future.done():
            self.future.set_result(None)


class SimulatedTransport(Transport):
    """One learner's end of a SimulatedNetwork."""

    def __init__(self, rank: int, network: SimulatedNetwork) -> None:
        super().__init__(rank, network.size)
        self.network = network
        self.gone = self.left = False
        self.collectives: dict[tuple[int, ...], int] = {}
        self._pending: list[tuple[tuple[int, ...], Future[None]]] = []
        self._answered: set[Future[None]] = set()  # calls whose reply is on its way
        self._lost: dict[int, str] = {}
        self._swaps: dict[int, _Swap] = {}
        self._early: dict[tuple[int, int], Tensor] = {}  # (round, peer): came before we reached that round
        self._handler: Handler | None = None
        self._refusing = False
        self._failure: BaseException | None = None
        self._offered: Callable[[], Tensor] | None = None
        self._waiting_fetches: list[Callable[[Callable[[], Tensor]], None]] = []
        self._waiting_calls: list[Callable[[Handler | None], None]] = []
        self._final: Tensor | None = None
        self._finished: Future[None] | None = None
        self._finishing_with: tuple[int, ...] = ()

    def pending(self, peers: tuple[int, ...]) -> Future[Any]:
        """A future that fails when one of `peers` is lost or `fail` is called."""
        future: Future[Any] = Future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        for peer in peers:
            if peer in self._lost:
                future.set_exception(PeerLostError(peer, self._lost[peer]))
                return future
        self._pending = [entry for entry in self._pending if not entry[1].done()]
        self._pending.append((peers, future))
        return future

    def lose(self, peer: int, reason: str) -> None:
        """Fail what depends on `peer`, then tell the listeners."""
        if peer in self._lost:
            return
        self._lost[peer] = reason
        for peers, future in self._pending:
            if peer in peers and not future.done() and not (reason == LEFT and future in self._answered):
                future.set_exception(PeerLostError(peer, reason))
        self._tell_lost(peer, reason)
        self._check_finished()

    def admit(self, peer: int, address: Address = ("", 0)) -> None:
        """`peer` can be reached again."""
        self._lost.pop(peer, None)

    @property
    def lost(self) -> dict[int, str]:
        """The peers that are gone, and why."""
        return dict(self._lost)

    def fail(self, error: BaseException) -> None:
        """Fail all that is pending, and the next `check`."""
        self._failure = self._failure or error
        for _, future in self._pending:
            if not future.done():
                future.set_exception(error)

    def check(self) -> None:
        """Raise what `fail` was given."""
        if self._failure is not None:
            raise self._failure

    def offer(self, state: Callable[[], Tensor]) -> None:
        """Give `state()` to learners that fetch it, those that have waited first."""
        self._offered = state
        waiting, self._waiting_fetches = self._waiting_fetches, []
        for answer in waiting:
            answer(state)

    def fetch(self, peer: int) -> Future[Tensor]:
        """A message of no length there, the state back."""
        future = self.pending((peer,))
        target = self.network.transports[peer]

        def replied(state: Tensor) -> None:
            if not future.done():
                future.set_result(state)

        def answer(offered: Callable[[], Tensor]) -> None:
            state = offered().clone()
            self.network.deliver(peer, self.rank, state.nbytes, lambda: replied(state))

        def asked() -> None:
            if target._offered is None:
                target._waiting_fetches.append(answer)
            else:
                answer(target._offered)

        self.network.deliver(self.rank, peer, 0, asked)
        return future

    def swap(
        self,
        round: int,
        outgoing: Tensor,
        incoming: Mapping[int, Tensor],
        wait: Callable[[], object] = lambda: None,
    ) -> Future[None]:
        """Send copies now, and take what has already come for this round."""
        future = self.pending(tuple(incoming))
        if future.done():
            return future
        wait()
        swap = self._swaps[round] = _Swap(incoming, future)
        for peer in incoming:
            self._send_swap(peer, round, outgoing)
        for peer in list(incoming):
            if (round, peer) in self._early:
                swap.fill(peer, self._early.pop((round, peer)))
        if not swap.missing:
            del self._swaps[round]
        if not incoming:
            future.set_result(None)
        return future

    def _send_swap(self, peer: int, round: int, outgoing: Tensor) -> None:
        payload, receiver = outgoing.clone(), self.network.transports[peer]
        self.network.deliver(self.rank, peer, payload.nbytes, lambda: receiver.receive_swap(self.rank, round, payload))

    def receive_swap(self, peer: int, round: int, payload: Tensor) -> None:
        """A peer's weights of `round` have arrived."""
        if round in self._swaps and peer in self._swaps[round].missing:
            self._swaps[round].fill(peer, payload)
            if not self._swaps[round].missing:
                del self._swaps[round]
        elif self._final is not None:
            self._send_swap(peer, round, self._final)
        else:
            self._early[round, peer] = payload

    def call(self, peer: int, buffer: Tensor, request: Request | None = None) -> Future[Tensor]:
        """The request travels, the handler runs, the reply travels back. A request is read from its memory."""
        future = self.pending((peer,))
        if future.done():
            return future
        if request:
            request.wait()
        target, message = self.network.transports[peer], (request.memory if request else buffer).clone()

        def replied() -> None:
            self._answered.discard(future)
            if not future.done():
                future.set_result(buffer.copy_(message))

        def ended(error: RoundelayError) -> None:
            self._answered.discard(future)
            if not future.done():
                future.set_exception(error)

        def answer(handler: Handler | None) -> None:
            if handler is None:
                self._answered.add(future)
                self.network.deliver(peer, self.rank, 0, lambda: ended(PeerLostError(peer, NO_CALLS)))
                return
            try:
                handler(self.rank, message, message)
            except RefusedError as error:
                target.refused.count(error.reason, f"a call of learner {self.rank}")
                self._answered.add(future)
                refusal = RefusedError(peer, error.reason)
                self.network.deliver(peer, self.rank, 0, lambda: ended(refusal))
                return
            self._answered.add(future)
            self.network.deliver(peer, self.rank, message.nbytes, replied)

        self.network.deliver(self.rank, peer, message.nbytes, lambda: target.answer(answer))
        return future

    def answer(self, request: Callable[[Handler | None], None]) -> None:
        """Serve a call now, or as soon as there is a handler."""
        if self._handler is None and not self._refusing:
            self._waiting_calls.append(request)
        else:
            request(self._handler)

    def serve(self, handler: Handler | None, undo: Undo | None = None) -> None:
        """Answer calls from now on, first those that have waited."""
        self._handler, self._refusing = handler, handler is None
        waiting, self._waiting_calls = self._waiting_calls, []
        for request in waiting:
            request(handler)

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Sum in order of rank, so that every run gives the same bits."""
        return self.network.gather(self, values, members, None)

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Copy the values of `source` to all."""
        return self.network.gather(self, values, members, source)

    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Keep answering until all members have finished."""
        self._final, self._finished, self._finishing_with = final, Future(), members
        for round, peer in list(self._early):
            del self._early[round, peer]
            self._send_swap(peer, round, final)
        for transport in self.network.transports:
            transport._check_finished()
        return self._finished

    def _check_finished(self) -> None:
        members = (t for t in self.network.transports if t.rank in self._finishing_with)
        others = (t for t in members if not t.gone and t.rank not in self._lost)
        if self._finished and not self._finished.done() and all(t._finished for t in others):
            self._finished.set_result(None)

    def close(self, failure: str = "") -> None:
        """Leave; the peers are told."""
        if not self.gone:
            self.network.lose(self.rank, f"{GAVE_UP} ({failure})" if failure else LEFT)
