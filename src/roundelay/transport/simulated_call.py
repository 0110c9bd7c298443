"""One call on the virtual clock: what `requests.py` and `call_server.py` do between processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from roundelay.errors import PeerLostError, RefusedError
from roundelay.transport.base import NO_CALLS, Begin, Call, Exchange
from roundelay.transport.checksum import checksum
from roundelay.transport.framing import CHECKSUM

if TYPE_CHECKING:
    from roundelay.transport.simulated_transport import SimulatedTransport


class _End:
    """One end of the exchange: it is closed when its future is done, and takes all pieces back if that has failed."""

    def __init__(self, context: AbstractContextManager[Exchange], future: Future[None]) -> None:
        self.exchange = context.__enter__()
        self.future = future
        future.add_done_callback(lambda ended: self._close(context, ended.exception()))

    @staticmethod
    def _close(context: AbstractContextManager[Exchange], error: BaseException | None) -> None:
        context.__exit__(None if error is None else type(error), error, None)

    def apply(self) -> None:
        for k in range(len(self.exchange.pieces)):
            self.exchange.apply(k)


class SimulatedCall:
    """Request, reply and confirmation. Request and reply travel at the same time, so an exchange takes the time of one.

    Args:
        caller: asks for the exchange.
        target: is asked.
        call: the exchange.
        future: of the caller; it fails with the target.
    """

    def __init__(
        self, caller: SimulatedTransport, target: SimulatedTransport, call: Call, future: Future[None]
    ) -> None:
        self._caller, self._target, self._call = caller, target, call
        self._mine = _End(call.begin(target.rank, call.buffer, call.buffer), future)

    def start(self) -> None:
        """Send the request."""
        exchange = self._mine.exchange
        for k in range(len(exchange.pieces)):
            exchange.prepare(k)
        self._message = self._call.buffer[: exchange.nbytes].clone()
        self._to_target(exchange.nbytes, lambda: self._target.answer(self))

    def answer(self, begin: Begin | None) -> None:
        """At the target, all pieces of the request have come: apply them, and reply; None refuses the call."""
        if begin is None:
            self._refuse(PeerLostError(self._target.rank, NO_CALLS))
            return
        confirmed = self._target.pending((self._caller.rank,))
        if confirmed.done():  # the target has lost the caller
            return
        try:
            self._check(self._caller, self._target)
            theirs = _End(begin(self._caller.rank, self._message, self._message), confirmed)
            theirs.apply()
        except RefusedError as error:
            self._target.refused.count(error.reason, f"a call of learner {self._caller.rank}")
            confirmed.set_exception(error)
            self._refuse(RefusedError(self._target.rank, error.reason))
            return
        self._target.serving(confirmed)
        self._target.applied(self, self._message, 1.0)
        confirmed.add_done_callback(self._ended_at_target)
        self._to_caller(self._message.nbytes, lambda: self._replied(confirmed))

    def _ended_at_target(self, confirmed: Future[None]) -> None:
        if confirmed.exception() is not None:
            self._target.applied(self, self._message, -1.0)

    def _replied(self, confirmed: Future[None]) -> None:
        """At the caller, all replies have come: apply and confirm them."""
        future = self._mine.future
        if future.done():  # it has failed; the target takes the exchange back when it hears of that
            self._to_target(0, lambda: _fail(confirmed, PeerLostError(self._caller.rank, "the call has failed")))
            return
        try:
            self._check(self._target, self._caller)
            self._call.buffer[: self._message.nbytes].copy_(self._message)
            self._mine.apply()
        except BaseException as error:
            if isinstance(error, RefusedError):
                self._caller.refused.count(error.reason, f"a reply of learner {self._target.rank}")
            future.set_exception(failure := error)
            self._to_target(0, lambda: _fail(confirmed, failure))
            return
        self._caller.applied(self, self._message, -1.0)
        self._target.on_its_way.add(confirmed)
        self._to_target(0, lambda: _succeed(confirmed))
        future.set_result(None)

    def _check(self, source: SimulatedTransport, target: SimulatedTransport) -> None:
        """Raise RefusedError if the message was altered on its way, which its checksum tells."""
        if source.alters(target):
            altered = self._message.clone()
            altered[4] ^= 8
            if checksum(altered) != checksum(self._message):
                raise RefusedError(source.rank, CHECKSUM)
            self._message = altered

    def _refuse(self, error: PeerLostError | RefusedError) -> None:
        self._to_caller(0, lambda: _fail(self._mine.future, error))

    def _to_target(self, nbytes: int, action: Callable[[], None]) -> None:
        self._caller.send_to(self._target, nbytes, action)

    def _to_caller(self, nbytes: int, action: Callable[[], None]) -> None:
        self._caller.on_its_way.add(self._mine.future)
        self._target.send_to(self._caller, nbytes, action, streamed=self._call.streams)


def _succeed(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
