"""Ctrl-C and SIGTERM: finish the step, save, leave. Learners that step together agree on the last step first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType


class StopRequest:
    """Counts the steps that were begun, and ends them when a signal asks for it.

    Args:
        last_step: from the steps this learner has begun to the number with which all of its party end; may wait for them.
    """

    def __init__(self, last_step: Callable[[int], int]) -> None:
        self._last_step = last_step
        self._begun = self._asked_at = 0
        self._limit: Future[int] = Future()
        self.requested = False
        self._wake_up, self._waker = os.pipe()
        threading.Thread(target=self._agree, name="roundelay-stop", daemon=True).start()

    def listen(self) -> None:
        """From now on signals ask to stop; Python hands them to the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._asked)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.request()

    def request(self) -> None:
        """Stop. Safe in a signal handler: it takes no lock."""
        if not self.requested:
            self.requested = True  # first: a step that begins without seeing this has been counted before the next line
            self._asked_at = self._begun
            with contextlib.suppress(BrokenPipeError):  # after the last step there is nothing to stop
                os.write(self._waker, b"!")

    def begin_step(self) -> bool:
        """Whether to take another step."""
        self._begun += 1
        if self.requested and self._begun > self._limit.result():
            self._begun -= 1
            return False
        return True

    def close(self) -> None:
        """No step will follow."""
        if not self.requested:
            os.write(self._waker, b".")

    def _agree(self) -> None:
        os.read(self._wake_up, 1)
        os.close(self._wake_up)
        if not self.requested:
            return
        try:
            self._limit.set_result(self._last_step(self._asked_at))
        except BaseException as error:  # raised in the training thread
            self._limit.set_exception(error)
