"""A virtual clock: processes are generators, and waiting costs no real time.

A strategy waits by yielding a `Future`. In a real run the learner blocks on that future until it is done or a peer is
lost. On the virtual clock the generator is resumed at the virtual time at which the future is completed.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from roundelay.errors import DeadlockError

Before = TypeVar("Before")
After = TypeVar("After")

Steps = Generator["Future[Any]", Any, None]
"""A strategy's hook: yields the futures that it waits for."""

Process = Generator["Future[Any] | float", Any, None]
"""A process on the virtual clock: yields futures to wait for, or seconds to sleep."""


def done(result: Any = None) -> Future[Any]:  # noqa: ANN401
    """A future that already has its result."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def first_of(*futures: Future[Any]) -> Future[None]:
    """A future that is done as soon as one of `futures` is, with a result or an error; its own result is None."""
    first: Future[None] = Future()

    def ended(_: Future[Any]) -> None:
        with contextlib.suppress(InvalidStateError):
            first.set_result(None)

    for future in futures:
        future.add_done_callback(ended)
    return first


def then(future: Future[Before], convert: Callable[[Before], After]) -> Future[After]:
    """A future with `convert(result)`. It fails if `future` fails, with the same error, or if `convert` raises."""
    converted: Future[After] = Future()

    def ended(before: Future[Before]) -> None:
        try:
            converted.set_result(convert(before.result()))
        except BaseException as error:
            converted.set_exception(error)

    future.add_done_callback(ended)
    return converted


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
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()  # events of the same time run in the order in which they were scheduled
        self._running: dict[Future[None], str] = {}

    def now(self) -> float:
        """Virtual seconds since the clock was created."""
        return self._now

    def call_later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Run `action` in `delay_s` virtual seconds; a negative delay means now, because time never runs backwards."""
        due = self._now + delay_s if delay_s > 0.0 else self._now
        heapq.heappush(self._events, (due, next(self._order), action))

    def spawn(self, process: Process, name: str = "process") -> Future[None]:
        """Start a process; the returned future is done when the process has ended."""
        ended: Future[None] = Future()
        self._running[ended] = name
        self.call_later(0.0, lambda: self._resume(process, ended, None, None))
        return ended

    def kill(self, ended: Future[None], process: Process) -> None:
        """End a process at its current yield, as SIGKILL ends a real one; `ended` is what `spawn` returned."""
        self._running.pop(ended, None)
        process.close()
        if not ended.done():
            ended.set_result(None)

    def run(self, until: float = float("inf")) -> None:
        """Run all events up to virtual time `until`.

        An error in a process is raised here; the other processes can go on with the next `run`. Raises DeadlockError if
        no event is left while processes still wait.
        """
        events, heappop = self._events, heapq.heappop
        while events and events[0][0] <= until:
            self._now, _, action = heappop(events)
            action()
        if until < float("inf"):
            self._now = max(self._now, until)
        if self._running and not self._events:
            raise DeadlockError(
                f"no event is left on the virtual clock, but these processes still wait: {', '.join(self._running.values())}"
            )

    def _resume(self, process: Process, ended: Future[None], value: object, error: BaseException | None) -> None:
        if ended not in self._running:
            return
        try:
            wanted = process.send(value) if error is None else process.throw(error)
            while isinstance(wanted, Future) and wanted.done():  # already done, so this process goes on at once
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
                wanted.add_done_callback(lambda finished: self._schedule(process, ended, finished))
            else:
                self.call_later(wanted, lambda: self._resume(process, ended, None, None))

    def _schedule(self, process: Process, ended: Future[None], finished: Future[Any]) -> None:
        error = finished.exception()
        value = None if error else finished.result()
        self.call_later(0.0, lambda: self._resume(process, ended, value, error))
