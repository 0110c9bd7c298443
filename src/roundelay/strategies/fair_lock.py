"""A lock for the live weights of a learner."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A lock that is handed to its waiters in the order in which they came.

    An exchange takes the lock once for every piece of the weights. With `threading.Lock` it could take the lock again
    and again while the training thread waits.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # guards the two below
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # blocks until `release` hands the lock over
        except BaseException:  # a signal handler has raised, KeyboardInterrupt for example: do not keep the lock
            with self._guard:
                still_waiting = turn in self._waiting
                if still_waiting:
                    self._waiting.remove(turn)
            if not still_waiting:
                self.release()
            raise

    def release(self) -> None:
        """Hand the lock to the first waiter. Any thread may call this, not only the one that holds the lock."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()
