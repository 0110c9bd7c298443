"""One learner's end of a network on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor

from roundelay.errors import PeerLostError
from roundelay.transport.base import GAVE_UP, LEFT, Address, Begin, Call, Swap, Transport
from roundelay.transport.simulated_call import SimulatedCall

if TYPE_CHECKING:
    from roundelay.transport.simulated import SimulatedNetwork


class _Posted:
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
        self.on_its_way: WeakSet[Future[None]] = WeakSet()  # futures whose message was already sent
        self._lost: dict[int, str] = {}
        self._swaps: dict[int, _Posted] = {}
        self._early: dict[tuple[int, int], Tensor] = {}  # (round, peer): came before we reached that round
        self._begin: Begin | None = None
        self._refusing = False
        self._failure: BaseException | None = None
        self._offered: Callable[[], Tensor] | None = None
        self._waiting_fetches: list[Callable[[Callable[[], Tensor]], None]] = []
        self._waiting_calls: list[SimulatedCall] = []
        self._final: Tensor | None = None
        self._finished: Future[None] | None = None
        self._finishing_with: tuple[int, ...] = ()

    def peer(self, rank: int) -> SimulatedTransport:
        """The transport of a peer."""
        return self.network.transports[rank]

    def send_to(
        self, target: SimulatedTransport, nbytes: int, action: Callable[[], None], *, streamed: bool = False
    ) -> None:
        """Run `action` at the target when a message of this size arrives there; see `SimulatedNetwork.deliver`."""
        self.network.deliver(self.rank, target.rank, nbytes, action, streamed=streamed)

    def applied(self, exchange: object, difference: Tensor, sign: float) -> None:
        """An exchange has changed the weights of this learner by `sign` times its share of the difference. For observers."""

    def serving(self, confirmed: Future[None]) -> None:
        """A call is being served until `confirmed` is done."""

    def alters(self, target: SimulatedTransport) -> bool:
        """Whether the message that travels to the target now is altered on its way."""
        return False

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
            if peer in peers and not future.done() and not (reason == LEFT and future in self.on_its_way):
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
        while self._waiting_fetches:
            self._waiting_fetches.pop(0)(state)

    def fetch(self, peer: int) -> Future[Tensor]:
        """Send an empty request; the reply is the state."""
        future = self.pending((peer,))
        if future.done():
            return future
        target = self.peer(peer)

        def replied(state: Tensor) -> None:
            if not future.done():
                future.set_result(state)

        def answer(offered: Callable[[], Tensor]) -> None:
            state = offered().clone()
            target.send_to(self, state.nbytes, lambda: replied(state))

        def asked() -> None:
            if target._offered is None:
                target._waiting_fetches.append(answer)
            else:
                answer(target._offered)

        self.send_to(target, 0, asked)
        return future

    def swap(self, swap: Swap) -> Future[None]:
        """Send copies now, and take what has already come for this round."""
        future = self.pending(tuple(swap.incoming))
        if future.done():
            return future
        swap.wait()
        posted = self._swaps[swap.round] = _Posted(swap.incoming, future)
        for peer in swap.incoming:
            self._send_swap(peer, swap.round, swap.outgoing)
        for peer in list(swap.incoming):
            if (swap.round, peer) in self._early:
                posted.fill(peer, self._early.pop((swap.round, peer)))
        if not posted.missing:
            del self._swaps[swap.round]
        if not swap.incoming:
            future.set_result(None)
        return future

    def _send_swap(self, peer: int, round: int, outgoing: Tensor) -> None:
        payload, receiver = outgoing.clone(), self.peer(peer)
        self.send_to(receiver, payload.nbytes, lambda: receiver.receive_swap(self.rank, round, payload))

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

    def call(self, peer: int, call: Call) -> Future[None]:
        """The pieces of the request travel, the peer applies them, and the replies travel back at the same time."""
        future = self.pending((peer,))
        if not future.done():
            SimulatedCall(self, self.peer(peer), call, future).start()
        return future

    def answer(self, call: SimulatedCall) -> None:
        """Serve a call now, or as soon as calls are served."""
        if self._begin is None and not self._refusing:
            self._waiting_calls.append(call)
        else:
            call.answer(self._begin)

    def serve(self, begin: Begin | None) -> None:
        """Answer calls from now on, first those that have waited."""
        self._begin, self._refusing = begin, begin is None
        while self._waiting_calls:
            self._waiting_calls.pop(0).answer(begin)

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Sum in order of rank, so that every run gives the same bits."""
        return self.network.gather(self, values, members, None)

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Copy the values of `source` to all."""
        return self.network.gather(self, values, members, source)

    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Keep answering until all members have finished."""
        self._final, self._finished, self._finishing_with = final, self.pending(()), members
        for round, peer in list(self._early):
            del self._early[round, peer]
            self._send_swap(peer, round, final)
        for transport in self.network.transports:
            transport._check_finished()
        return self._finished

    def _check_finished(self) -> None:
        awaited = set(self._finishing_with) - self._lost.keys()
        others = (t for t in self.network.transports if t.rank in awaited and not t.gone)
        if self._finished and not self._finished.done() and all(t._finished for t in others):
            self._finished.set_result(None)

    def close(self, failure: str = "") -> None:
        """Leave; the peers are told."""
        if not self.gone:
            self.network.lose(self.rank, f"{GAVE_UP} ({failure})" if failure else LEFT)
