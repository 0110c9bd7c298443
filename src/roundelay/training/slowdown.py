"""Making one learner slower on purpose, to see what a straggler does to the others."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

_WORK = bytes(2**16)  # hashing it takes about 0.1 ms, without Python's lock


class Slowdown:
    """Makes the steps of a learner `factor` times as long.

    In every step, between backward and the update, the learner pauses for (factor - 1) times the duration of its last
    whole step: data, forward, backward and update, without the pause and without waiting for other learners. So its
    gradients are as old as those of a slow machine would be.

    The pause computes instead of sleeping. When a process wakes from sleep on a loaded machine, it gets a core at once, so
    its own step would become faster than the step of the same learner without a slowdown, and the factor would be wrong.

    Args:
        factor: at least 1; with 1 there is no pause.
        check: called about every 0.1 ms during a pause; it may raise to end the step.
    """

    def __init__(self, factor: float, check: Callable[[], None] = lambda: None) -> None:
        self._factor, self._check = factor, check
        self._step_s = self._pause_s = self._began = 0.0

    def begin(self, waited_s: float) -> None:
        """The next step begins now; `waited_s` is how long the learner has waited for others so far, in seconds."""
        self._began = time.perf_counter() - waited_s

    def pause(self) -> None:
        """Compute for (factor - 1) times the duration of the last step."""
        began = time.perf_counter()
        end = began + (self._factor - 1) * self._step_s
        while time.perf_counter() < end:
            hashlib.sha256(_WORK)
            self._check()
        self._pause_s = time.perf_counter() - began

    def end(self, waited_s: float) -> None:
        """The step ends, and the next one begins."""
        now = time.perf_counter() - waited_s
        self._step_s = now - self._began - self._pause_s
        self._began = now
