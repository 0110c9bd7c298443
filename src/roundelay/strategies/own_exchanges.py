"""The exchanges that an asynchronous learner has started itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from roundelay.clock import Steps, done, first_of
from roundelay.errors import PeerLostError, RefusedError
from roundelay.strategies.exchange_counts import ExchangeCounts
from roundelay.strategies.pair_average import PairAverage
from roundelay.strategies.pair_exchange import CallingEnd
from roundelay.strategies.partners import Partners
from roundelay.transport.base import NO_CALLS, Call, Transport
from roundelay.weights.flat import NON_FINITE, Flat


@dataclass(frozen=True)
class _Exchange:
    """The peer, and a future that is done once the exchange has ended in any way."""

    peer: int = -1
    over: Future[None] = field(default_factory=done)


class OwnExchanges:
    """One exchange at a time, and one more that is set aside while its peer is silent.

    The training thread starts exchanges; they end in threads of the transport, or on the virtual clock.

    Args:
        live: the weights that are exchanged.
        transport: carries them.
        partners: which peer is next.
        counts: guarded by the lock of the live weights.

    Attributes:
        disagreement2: |s_i - x_j|^2 of the last exchange.
    """

    def __init__(self, live: PairAverage, transport: Transport, partners: Partners, counts: ExchangeCounts) -> None:
        self._live, self._transport, self._partners, self._counts = live, transport, partners, counts
        self._buffers = [self._new_buffer()]  # free: no exchange uses them
        self._last = self._aside = _Exchange()
        self._failure: BaseException | None = None  # raised in a thread of the transport
        self.disagreement2 = 0.0

    def _new_buffer(self) -> Flat:
        return Flat(self._live.flat.views, self._transport.allocate)

    def start_unless_under_way(self) -> None:
        """Call the next partner, unless the last call is still under way."""
        if self._last.over.done():
            self._start()

    def wait_for_lead(self, max_lead: int, tries: int) -> Steps:
        """Wait until the lead is shorter than `max_lead`, or no peer is left to exchange with.

        The number of tries is bounded: if every peer refuses this learner's weights, the learner must go on.
        """
        for _ in range(tries):
            change = self._partners.change()  # before looking, so that no change is missed
            if self._counts.lead < max_lead:
                return
            if self._aside.over.done() and self._partners.is_silent(self._last.peer):
                self._aside, self._last = self._last, _Exchange()
            if self._last.over.done() and not self._start() and self._aside.over.done():
                return
            pending = [each.over for each in (self._last, self._aside) if not each.over.done()]
            if pending:
                yield first_of(change, *pending)
            self.raise_failure()

    def drain(self) -> Steps:
        """Wait until all own exchanges have ended."""
        yield self._last.over
        yield self._aside.over
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what went wrong in a thread of the transport."""
        if self._failure is not None:
            raise self._failure

    def _start(self) -> bool:
        """Start an exchange with the next partner; False if there is none."""
        busy = None if self._aside.over.done() else self._aside.peer
        peer = self._partners.next(busy)
        if peer is None:
            return False
        self._counts.call_started(peer)
        exchange = self._last = _Exchange(peer, Future())
        buffer = self._buffers.pop() if self._buffers else self._new_buffer()
        ended = self._transport.call(peer, Call(self._live.flat.storage, buffer.storage, self._begin))
        ended.add_done_callback(lambda ended: self._ended(ended, exchange, buffer))
        return True

    @contextlib.contextmanager
    def _begin(self, peer: int, request: Tensor, reply: Tensor) -> Iterator[CallingEnd]:
        with self._live.call(peer, request, reply) as end:
            yield end
        with self._live.lock:
            self._counts.finished += 1
            self._counts.exchanged()
        self.disagreement2 = end.distance2

    def _ended(self, ended: Future[None], exchange: _Exchange, buffer: Flat) -> None:
        try:
            self._take_result(ended, exchange.peer, buffer)
        except BaseException as unexpected:  # a future swallows what its callbacks raise: the next step raises this
            self._failure = unexpected
        finally:
            exchange.over.set_result(None)

    def _take_result(self, ended: Future[None], peer: int, buffer: Flat) -> None:
        # Not `result()`: the error's traceback would hold this frame, which holds `ended`, which holds the error. Only the
        # garbage collector would end that cycle, and the shared memory of the buffer with it.
        error = ended.exception()
        if isinstance(error, PeerLostError):
            self._count_failed()
            if error.reason == NO_CALLS or peer in self._transport.lost:  # not if it has come back at another address
                self._partners.lose(peer, error.reason)
            self._transport.free(buffer.storage)  # a peer that is only frozen may still write to it
            return
        if isinstance(error, RefusedError):
            self._count_failed()
            if error.reason == NON_FINITE:
                self._live.stop_narrowing()  # a number may be too large for the wire dtype
        elif error is not None:
            raise error
        self._buffers.append(buffer)

    def _count_failed(self) -> None:
        with self._live.lock:
            self._counts.failed += 1
