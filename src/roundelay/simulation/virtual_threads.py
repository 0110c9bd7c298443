"""Processes and threads on the virtual clock: code that blocks runs there as it is.

A `VirtualThread` is a real thread, but only one runs at a time: the clock hands control to it, and the thread hands control back
when it waits (`roundelay.waiting`). So a run is as deterministic as the clock.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from roundelay import threads, waiting
from roundelay.clock import VirtualClock


class KilledError(BaseException):
    """Ends the thread of a process that was killed. It is no Exception, so that no code handles it."""


class VirtualProcess:
    """A process that may freeze, wake and be killed. What it has planned waits while it is frozen, and is lost with it.

    Args:
        clock: on which it lives.
        name: for messages.

    Attributes:
        alive: it was not killed, and has not ended.
        frozen: as after SIGSTOP.
    """

    def __init__(self, clock: VirtualClock, name: str) -> None:
        self.clock, self.name = clock, name
        self.alive, self.frozen = True, False
        self._held: list[Callable[[], None]] = []  # what was due while it was frozen
        self.on_end: list[Callable[[], None]] = []
        self._thread: VirtualThread | None = None

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in this process after a time."""
        self.clock.call_later(delay_s, lambda: self.run(action))

    def run(self, action: Callable[[], None]) -> None:
        """Run `action` now, or when the process wakes; never if it has ended."""
        if self.frozen:
            self._held.append(action)
        elif self.alive:
            action()

    def every(self, period_s: float, action: Callable[[], None], first_s: float = 0.0) -> None:
        """Run `action` again and again, until the process ends or the action raises StopIteration."""

        def act() -> None:
            try:
                action()
            except StopIteration:
                return
            self.call_later(period_s, act)

        self.call_later(first_s, act)

    def start(self, target: Callable[[], None]) -> Future[None]:
        """Run `target` in the main thread of this process. The future fails with what it raises."""
        self._thread = VirtualThread(self, target)
        self.call_later(0.0, self._thread.resume)
        return self._thread.ended

    def freeze(self) -> None:
        """Stop the process."""
        self.frozen = self.alive

    def wake(self) -> None:
        """Let a frozen process go on: all that was due happens now, in order."""
        self.frozen = False
        held, self._held = self._held, []
        for action in held:
            self.clock.call_later(0.0, lambda action=action: self.run(action))  # type: ignore[misc]

    def where(self) -> str:
        """The functions in which its thread waits, the outermost first."""
        return "" if self._thread is None else self._thread.where()

    def end(self) -> None:
        """The process is gone: its connections close, and its thread ends where it waits."""
        if not self.alive:
            return
        self.alive = self.frozen = False
        self._held.clear()
        for action in self.on_end:
            action()
        if self._thread is not None:
            self._thread.kill()


class VirtualThread:
    """The main thread of a process.

    Args:
        process: to which it belongs.
        target: what it runs.

    Attributes:
        ended: done when the target has returned or raised; cancelled if the thread was killed.
    """

    def __init__(self, process: VirtualProcess, target: Callable[[], None]) -> None:
        self._process, self._target = process, target
        self.ended: Future[None] = Future()
        self._go, self._parked = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._parked.acquire()
        self._killed = self._over = False
        self._waits = 0  # numbers the waits, so that a late reason to go on is recognised
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Let the thread run until it waits or ends. Called by the clock."""
        if self._over:
            return
        if self._thread is None:
            self._thread = threads.start("virtual", self._run)
        self._go.release()
        self._parked.acquire()
        if self.ended.done():
            self._thread.join()

    def kill(self) -> None:
        """Raise KilledError where the thread waits."""
        self._killed = True
        if self._thread is not None:
            self.resume()
        elif not self._over:
            self.ended.cancel()
        self._over = True

    def now(self) -> float:
        """Virtual seconds."""
        return self._process.clock.now()

    def wait(self, future: Future[Any] | None, timeout_s: float | None) -> None:
        """Hand control back until the future is done, or `timeout_s` is over."""
        if self._killed:
            raise KilledError
        self._waits += 1
        number = self._waits

        def go_on() -> None:
            if number == self._waits and not self._over:
                self._waits += 1
                self.resume()

        if future is not None:
            future.add_done_callback(lambda _: self._process.call_later(0.0, go_on))
        if timeout_s is not None:
            self._process.call_later(timeout_s, go_on)
        self._parked.release()
        self._go.acquire()
        if self._killed:
            raise KilledError

    def where(self) -> str:
        """The functions in which this thread waits, the outermost first."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread.ident or 0)
        names = [each.name for each in traceback.extract_stack(frame)] if frame else []
        return " > ".join(names[3:-1])

    def _run(self) -> None:
        self._go.acquire()
        waiting.run_on(self)
        try:
            if not self._killed:
                self._target()
            self.ended.set_result(None)
        except KilledError:
            self.ended.cancel()
        except BaseException as error:
            self.ended.set_exception(error)
        finally:
            self._over = True
            self._parked.release()
