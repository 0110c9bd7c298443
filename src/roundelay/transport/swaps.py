"""The swaps of one learner: which are posted, what has come in and gone out, and what happens after the last one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError

from torch import Tensor

from roundelay.errors import StrategyError


class _Posted:
    def __init__(self, incoming: Mapping[int, Tensor], future: Future[None]) -> None:
        self.incoming, self.future = incoming, future
        self.missing = {*incoming}
        self.unsent = {*incoming}


class SwapBoard:
    """Pairs what peers push with the round in which we ask for it. Threads that bring a push wait here for that round.

    Args:
        send_final: (peer, round, weights): answer somebody who still swaps after we have finished.
    """

    def __init__(self, send_final: Callable[[int, int, Tensor], None]) -> None:
        self._send_final = send_final
        self._changed = threading.Condition()
        self._posted: dict[int, _Posted] = {}
        self._final: Tensor | None = None
        self._all_finished: Future[None] = Future()
        self._active: set[int] = set()
        self._finished: set[int] = set()
        self._closed = False

    def post(self, round: int, incoming: Mapping[int, Tensor], future: Future[None]) -> None:
        """We have come to `round`."""
        with self._changed:
            posted = self._posted[round] = _Posted(incoming, future)
            self._changed.notify_all()
        self._complete(round, posted)

    def target(self, round: int, peer: int) -> Tensor | None:
        """Where a push of `peer` belongs; waits until we have come to its round. None: nowhere, we have finished."""
        with self._changed:
            self._changed.wait_for(lambda: round in self._posted or self._final is not None or self._closed)
            if round in self._posted:
                if peer not in self._posted[round].incoming:
                    raise StrategyError(
                        f"learner {peer} swaps with us in round {round}, but is no neighbour of ours then; "
                        "build the same mixing with the same seed everywhere"
                    )
                return self._posted[round].incoming[peer]
            final = self._final
        if final is None:
            raise ConnectionAbortedError("this learner has closed")
        self._send_final(peer, round, final)
        return None

    def received(self, round: int, peer: int) -> None:
        """A push has arrived in full."""
        with self._changed:
            posted = self._posted.get(round)
            if posted is not None:
                posted.missing.discard(peer)
        if posted is not None:
            self._complete(round, posted)

    def sent(self, round: int, peer: int, error: BaseException | None) -> None:
        """Our own push has gone out."""
        with self._changed:
            posted = self._posted.get(round)
            if posted is None:
                return
            posted.unsent.discard(peer)
        if error is not None:
            with contextlib.suppress(InvalidStateError):
                posted.future.set_exception(error)
        self._complete(round, posted)

    def _complete(self, round: int, posted: _Posted) -> None:
        with self._changed:
            if posted.missing or posted.unsent:
                return
            self._posted.pop(round, None)
        with contextlib.suppress(InvalidStateError):
            posted.future.set_result(None)

    def finish(self, final: Tensor, others: set[int]) -> Future[None]:
        """From now on answer with `final`; the future is done when all others have finished too."""
        with self._changed:
            self._final = final
            self._active = others
            self._changed.notify_all()
        self._check()
        return self._all_finished

    def peer_finished(self, peer: int) -> None:
        """`peer` swaps no more."""
        with self._changed:
            self._finished.add(peer)
        self._check()

    def _check(self) -> None:
        with self._changed:
            finished = self._final is not None and self._active <= self._finished
        if finished:
            with contextlib.suppress(InvalidStateError):
                self._all_finished.set_result(None)

    def close(self) -> None:
        """Let nobody wait here any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
