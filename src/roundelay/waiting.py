"""How a learner's own thread waits: for a future, or for some time. On the virtual clock, virtual time passes meanwhile.

All code that blocks in a learner's thread waits by these functions, so the same code runs in real processes and in a simulation.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class VirtualThread(Protocol):
    """A thread that runs on the virtual clock; see `simulation/virtual_threads.py`."""

    def now(self) -> float:
        """Virtual seconds."""

    def wait(self, future: Future[Result] | None, timeout_s: float | None) -> None:
        """Return when the future is done, or after `timeout_s`."""


class _Here(threading.local):
    thread: VirtualThread | None = None


_here = _Here()


def run_on(thread: VirtualThread) -> None:
    """From now on the calling thread waits on the virtual clock."""
    _here.thread = thread


def now() -> float:
    """Seconds of the clock on which this thread waits."""
    return time.monotonic() if _here.thread is None else _here.thread.now()


def sleep(seconds: float) -> None:
    """Wait for some time."""
    if _here.thread is None:
        time.sleep(seconds)
    else:
        _here.thread.wait(None, seconds)


def result(future: Future[Result], timeout_s: float | None = None) -> Result:
    """Wait for the result of a future. Raises its error, or TimeoutError if it is not done within `timeout_s`."""
    if _here.thread is not None and not future.done():
        _here.thread.wait(future, timeout_s)
        timeout_s = 0.0
    return future.result(timeout_s)
