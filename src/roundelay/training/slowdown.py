"""Making one learner slower on purpose, to see what a straggler does to the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from roundelay.transport.heartbeats import BEAT_S

MEASURED_STEPS = 10  # the first steps of a learner, which run at full speed


class Slowdown:
    """Makes the steps of a learner `factor` times as long as they are at full speed.

    A step is data, forward, backward and update, without waiting for other learners. The first `MEASURED_STEPS` steps run
    at full speed, and their median is the duration to be multiplied. Later steps are not
    measured, because the pause makes them faster: on a loaded machine, a process that sleeps most of the time gets a
    core at once when it wakes.

    The pause is between backward and the update, so gradients are as stale as on a slow machine.

    Args:
        factor: at least 1; with 1 there is no pause.
        check: called at least once per heartbeat interval during a pause; it may raise to end the step.
        now: the clock, in seconds.
        sleep: blocks for the given number of seconds.
    """

    def __init__(
        self,
        factor: float,
        check: Callable[[], None] = lambda: None,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._factor, self._check, self._now, self._sleep = factor, check, now, sleep
        self._began = self._backward_ended = 0.0
        self._steps: list[float] = []  # seconds of each measured step
        self._updates: list[float] = []  # seconds of each measured step after backward

    def begin(self, waited_s: float) -> None:
        """The next step begins now. `waited_s` is how long the learner has waited for others so far, in seconds."""
        self._began = self._now() - waited_s

    def pause(self, waited_s: float) -> None:
        """After backward: sleep, such that the whole step will have `factor` times its duration at full speed."""
        self._backward_ended = self._now() - waited_s
        if self._factor == 1 or len(self._steps) < MEASURED_STEPS:
            return
        rest_s = statistics.median(self._updates)
        end = self._began + self._factor * statistics.median(self._steps) - rest_s + waited_s
        while (left := end - self._now()) > 0:
            self._sleep(min(left, BEAT_S))
            self._check()

    def end(self, waited_s: float) -> None:
        """The step is over, and the next one begins."""
        now = self._now() - waited_s
        if len(self._steps) < MEASURED_STEPS:
            self._steps.append(now - self._began)
            self._updates.append(now - self._backward_ended)
        self._began = now
