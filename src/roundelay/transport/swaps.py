"""The swaps of one learner: which rounds are posted, what was received and sent, and what happens after the last one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from torch import Tensor

from roundelay.errors import StrategyError
from roundelay.transport.base import Swap


class _Posted:
    def __init__(self, swap: Swap, future: Future[None]) -> None:
        self.incoming, self.future = swap.incoming, future
        self.missing = {*swap.incoming}
        self.unsent = {*swap.incoming}


class Swaps:
    """Matches what peers push with our rounds. A thread that receives a push waits here until we post its round.

    Args:
        push: sends our part of a swap to a peer, in a thread of its own.
        give_up: (peer, reason): called if a peer that still swaps after we have finished could not be answered.
    """

    def __init__(self, push: Callable[[int, Swap], Future[None]], give_up: Callable[[int, str], None]) -> None:
        self._push, self._give_up = push, give_up
        self._changed = threading.Condition()
        self._posted: dict[int, _Posted] = {}
        self._final: Tensor | None = None
        self._all_finished: Future[None] = Future()
        self._active: set[int] = set()
        self._finished: set[int] = set()
        self._closed = False

    def start(self, swap: Swap, future: Future[None]) -> None:
        """Take part in a swap: push to its peers, fill `incoming`, then complete the future."""
        with self._changed:
            posted = self._posted[swap.round] = _Posted(swap, future)
            self._changed.notify_all()
        for peer in swap.incoming:
            pushed = self._push(peer, swap)
            pushed.add_done_callback(
                lambda sent, peer=peer: self._sent(swap.round, peer, sent.exception())  # type: ignore[misc]
            )
        self._complete(swap.round, posted)

    def target(self, round: int, peer: int) -> Tensor | None:
        """The buffer for a push of `peer`; waits until we post its round. None if we have finished: the push is not needed."""
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
        self._push(peer, Swap(round, final, {})).add_done_callback(
            lambda sent: self._final_sent(peer, sent.exception())
        )
        return None

    def _final_sent(self, peer: int, error: BaseException | None) -> None:
        if error is not None:
            self._give_up(peer, f"its final weights could not be sent: {error}")

    def received(self, round: int, peer: int) -> None:
        """A push of `peer` has arrived in full."""
        with self._changed:
            posted = self._posted.get(round)
            if posted is not None:
                posted.missing.discard(peer)
        if posted is not None:
            self._complete(round, posted)

    def _sent(self, round: int, peer: int, error: BaseException | None) -> None:
        """Our own push to `peer` has ended."""
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
        """Answer with `final` from now on; the future is done when all others have finished, too."""
        with self._changed:
            self._final = final
            self._active = others
            self._changed.notify_all()
        self._complete_finish()
        return self._all_finished

    def peer_finished(self, peer: int) -> None:
        """`peer` starts no more swaps."""
        with self._changed:
            self._finished.add(peer)
        self._complete_finish()

    def _complete_finish(self) -> None:
        with self._changed:
            finished = self._final is not None and self._active <= self._finished
        if finished:
            with contextlib.suppress(InvalidStateError):
                self._all_finished.set_result(None)

    def close(self) -> None:
        """Wake all threads that wait here."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
