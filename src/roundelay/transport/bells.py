"""Bells: semaphores in shared memory, with which one process wakes another."""

from __future__ import annotations

import ctypes
import errno
import time

BELL_BYTES = 64  # a semaphore has 32 in glibc; a cache line each

_CLOCK_MONOTONIC = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """Rings are counted: each ends one wait, whichever comes first. What was written before a ring is seen after the wait.

    Args:
        address: of `BELL_BYTES` bytes in shared memory, which somebody keeps mapped for as long as this is used.
    """

    def __init__(self, address: int) -> None:
        self._semaphore = ctypes.c_void_p(address)

    def hang(self) -> None:
        """Make it; once, before anybody rings."""
        _check(_libc.sem_init(self._semaphore, 1, 0))

    def ring(self) -> None:
        """Wake one who waits, or will."""
        _check(_libc.sem_post(self._semaphore))

    def wait(self, seconds: float) -> bool:
        """Until it rings; False if it has not within so long."""
        due_s = time.monotonic() + seconds
        due = _Timespec(int(due_s), int(due_s % 1.0 * 1e9))
        while _libc.sem_clockwait(self._semaphore, _CLOCK_MONOTONIC, ctypes.byref(due)):
            if ctypes.get_errno() == errno.ETIMEDOUT:
                return False
            if ctypes.get_errno() != errno.EINTR:
                _check(-1)
        return True


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "a semaphore in shared memory does not work")


def available() -> bool:
    """Linux with glibc 2.30 or newer."""
    return hasattr(_libc, "sem_clockwait")
