"""Threads that make requests for the training thread, which has no time to wake them."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from roundelay.transport.turns import give_way

Result = TypeVar("Result")

THREAD_NAME = "roundelay-call"
MOST_THREADS = 32
DELAY = 1 / 16  # of the time between two patient requests: by then the training thread is in its forward pass
LONGEST_DELAY_S = 0.0015

_libc = ctypes.PyDLL(None, use_errno=True)  # its functions below never block
_libc.timerfd_settime.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]
_TIMER_SPEC = struct.Struct("4l")
_CLOCK_MONOTONIC = 1


class Callers:
    """Makes requests in other threads: at once, or a moment later in one that is patient (see `turns`).

    Waking a thread costs the training thread a tenth of a millisecond right after a step, and then the two fight over the
    interpreter. So for what nobody waits for it sets a timer instead, which wakes that thread during the next forward pass.

    Args:
        size: how many learners there may be requests to, one at a time each.
    """

    def __init__(self, size: int) -> None:
        workers = max(2, min(size, MOST_THREADS))
        self._hurried, self._patient = (
            ThreadPoolExecutor(workers, THREAD_NAME, functools.partial(give_way, patient=patient))
            for patient in (False, True)
        )
        self._later: _LaterCaller | None = None
        self._asked_s = time.monotonic()

    def submit(self, request: Callable[..., Result], *arguments: object, patient: bool = False) -> Future[Result]:
        """Make a request at once."""
        return (self._patient if patient else self._hurried).submit(request, *arguments)

    def submit_later(self, request: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Make a request soon, patiently; at once if the one before has not been answered yet."""
        if self._later is None and sys.platform == "linux":
            self._later = _LaterCaller()
        now_s = time.monotonic()
        delay_s = min(DELAY * (now_s - self._asked_s), LONGEST_DELAY_S)
        self._asked_s = now_s
        future = self._later.submit(delay_s, request, *arguments) if self._later else None
        return future or self.submit(request, *arguments)

    def shutdown(self) -> None:
        """Wait for the requests under way; no more may be submitted."""
        self._hurried.shutdown(wait=True)
        self._patient.shutdown(wait=True)
        if self._later:
            self._later.shutdown()


class _LaterCaller:
    """One thread for one request at a time."""

    def __init__(self) -> None:
        self._alarm = Alarm()
        self._free = threading.Lock()  # to take another request
        self._taken: tuple[Future[Any], Callable[..., Any], tuple[object, ...]] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def submit(self, delay_s: float, request: Callable[..., Result], *arguments: object) -> Future[Result] | None:
        """Make a request after some time, unless there is one already."""
        if not self._free.acquire(blocking=False):
            return None
        future: Future[Result] = Future()
        self._taken = future, request, arguments
        self._alarm.set(delay_s)
        return future

    def _run(self) -> None:
        give_way(patient=True)
        while self._taken or not self._closing:
            self._alarm.wait()
            if self._taken:
                self._make(*self._taken)

    def _make(self, future: Future[Any], request: Callable[..., Any], arguments: tuple[object, ...]) -> None:
        try:
            result, error = request(*arguments), None
        except BaseException as raised:  # as an executor does: whoever has the future hears of it
            result, error = None, raised
        self._taken = None
        self._free.release()
        future.set_exception(error) if error else future.set_result(result)

    def shutdown(self) -> None:
        """Wait for the request under way."""
        self._closing = True
        self._alarm.set(0.0)
        self._thread.join()
        self._alarm.close()


class Alarm:
    """Wakes a thread later, at the cost of a system call for who sets it. Linux only.

    >>> alarm = Alarm()
    >>> alarm.set(0.001)
    >>> alarm.wait()
    >>> alarm.close()
    """

    def __init__(self) -> None:
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "cannot make a timer")

    def set(self, seconds: float) -> None:
        """Go off once, after so long; instead of when it was to go off before, if it has not yet."""
        whole_s, rest_s = divmod(seconds, 1.0)
        spec = _TIMER_SPEC.pack(0, 0, int(whole_s), max(1, int(1e9 * rest_s)))  # zero would mean never
        if _libc.timerfd_settime(self._fd, 0, spec, None):
            raise OSError(ctypes.get_errno(), "cannot set a timer")

    def wait(self) -> None:
        """Until it has gone off since the last wait."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Nobody waits for it any more."""
        os.close(self._fd)
