"""Time: the machine's, or a virtual one on which processes are generators and nothing ever waits.

Both worlds share one notion of waiting: a `Future`. A real learner blocks on it, bounded by its peers' heartbeats; on the
virtual clock a generator yields it and is resumed at the virtual time at which somebody completes it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import Any

from roundelay.errors import DeadlockError

Steps = Generator["Future[Any]", Any, None]
Process = Generator["Future[Any] | float", Any, None]


def done(result: Any = None) -> Future[Any]:  # noqa: ANN401
    """A future that has its result already."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def first_of(*futures: Future[Any]) -> Future[None]:
    """Done as soon as one of them is, however that one ended."""
    first: Future[None] = Future()

    def ended(_: Future[Any]) -> None:
        with contextlib.suppress(InvalidStateError):
            first.set_result(None)

    for future in futures:
        future.add_done_callback(ended)
    return first


class VirtualClock:
    """A deterministic event loop: equal inputs give equal runs, bit for bit.

    >>> clock, log = VirtualClock(), []
    >>> def walker(name, pace_s):
    ...     for _ in range(2):
    ...         yield pace_s
    ...         log.append((name, clock.now()))
    >>> _ = clock.spawn(walker("slow", 1.0)), clock.spawn(walker("fast", 0.25))
    >>> clock.run()
    >>> log
    [('fast', 0.25), ('fast', 0.5), ('slow', 1.0), ('slow', 2.0)]
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()  # events of the same instant happen in the order they were asked for
        self._running: dict[Future[None], str] = {}

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._now

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have `action` done `delay_s` from now; what is due already happens now, for time never runs backwards."""
        due = self._now + delay_s if delay_s > 0.0 else self._now
        heapq.heappush(self._events, (due, next(self._order), action))

    def call_at(self, due_s: float, action: Callable[[], None]) -> None:
        """Have `action` done at that time, which is not past."""
        heapq.heappush(self._events, (due_s, next(self._order), action))

    def after(self, delay_s: float) -> Future[None]:
        """A future completed `delay_s` from now."""
        future: Future[None] = Future()
        self.call_later(delay_s, lambda: future.set_result(None))
        return future

    def spawn(self, process: Process, name: str = "process") -> Future[None]:
        """Start a generator that yields seconds to sleep or futures to wait for; the result says when it has ended."""
        ended: Future[None] = Future()
        self._running[ended] = name
        self.call_later(0.0, lambda: self._resume(process, ended, None, None))
        return ended

    def kill(self, ended: Future[None], process: Process) -> None:
        """End a process where it stands, as SIGKILL would."""
        self._running.pop(ended, None)
        process.close()
        if not ended.done():
            ended.set_result(None)

    def run(self, until: float = float("inf")) -> None:
        """Let events happen up to virtual time `until`.

        Raises what a process raised, and DeadlockError if nothing is left to happen while processes still wait.
        """
        events, heappop = self._events, heapq.heappop
        while events and events[0][0] <= until:
            self._now, _, action = heappop(events)
            action()
        if until < float("inf"):
            self._now = max(self._now, until)
        if self._running and not self._events:
            raise DeadlockError(
                f"nothing can happen any more, but these still wait: {', '.join(self._running.values())}"
            )

    def _resume(self, process: Process, ended: Future[None], value: object, error: BaseException | None) -> None:
        if ended not in self._running:
            return
        try:
            wanted = process.send(value) if error is None else process.throw(error)
            while isinstance(wanted, Future) and wanted.done():  # nothing to wait for, so nobody else's turn either
                error = wanted.exception()
                wanted = process.throw(error) if error else process.send(wanted.result())
        except StopIteration:
            del self._running[ended]
            ended.set_result(None)
        except BaseException:
            del self._running[ended]
            raise
        else:
            if isinstance(wanted, Future):
                wanted.add_done_callback(lambda heard: self._schedule(process, ended, heard))
            else:
                self.call_later(wanted, lambda: self._resume(process, ended, None, None))

    def _schedule(self, process: Process, ended: Future[None], heard: Future[Any]) -> None:
        error = heard.exception()
        value = None if error else heard.result()
        self.call_later(0.0, lambda: self._resume(process, ended, value, error))
