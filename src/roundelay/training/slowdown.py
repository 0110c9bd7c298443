"""Making one learner slower on purpose, to see what a straggler does to the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from roundelay.transport.heartbeats import BEAT_S

_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # Linux: nanoseconds on a core, nanoseconds ready without a core, ...
_WIDTH = 256  # of a matrix whose square takes about a millisecond: as long as the operations of a real step


class Work(NamedTuple):
    """What a thread has done so far: seconds on a core, and seconds idle (for a device, a disk or a sleep)."""

    core_s: float
    idle_s: float


class Machine(Protocol):
    """Measures the work of the calling thread, and repeats work."""

    def work(self) -> Work:
        """The work of this thread so far. Time in which the thread was ready and had no core is in neither part."""

    def compute(self, seconds: float) -> None:
        """Use a core for so many seconds."""

    def sleep(self, seconds: float) -> None:
        """Be idle for so many seconds."""


class ThisMachine:
    """The real clocks of the calling thread.

    If the kernel does not report how long a thread was ready without a core, this time counts as idle.
    """

    def __init__(self) -> None:
        self._matrix = torch.full((_WIDTH, _WIDTH), 1 / _WIDTH)
        self._product = torch.empty(_WIDTH, _WIDTH)

    def work(self) -> Work:
        """The work of this thread so far."""
        core_s, ready_s = time.thread_time(), 0.0
        with contextlib.suppress(OSError):
            ready_s = 1e-9 * int(_SCHEDSTAT.read_text().split()[1])
        return Work(core_s, time.perf_counter() - core_s - ready_s)

    def compute(self, seconds: float) -> None:
        """Multiply matrices: torch releases Python's global lock meanwhile, as in a real step, so other threads can run."""
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            torch.mm(self._matrix, self._matrix, out=self._product)

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


class Slowdown:
    """Makes a learner do the work of each of its steps `factor` times.

    A step is data, forward, backward and update, without waiting for other learners. The time of a step on a core is
    repeated on a core, and its idle time is repeated as a sleep. So the slowed learner uses the cores as much as a
    normal learner, and its step takes `factor` times as long even if there are more learners than cores. If the slowed
    learner only slept, it would leave its core to the others, and would get a core at once when it wakes.

    The pause is between backward and the update, so gradients are as stale as on a slow machine. The pause also makes up
    for the update of the step before.

    Args:
        factor: at least 1; with 1 there is no pause.
        check: called at least once per heartbeat interval of work in a pause; it may raise to end the step.
        machine: measures and repeats the work.
    """

    def __init__(
        self, factor: float, check: Callable[[], None] = lambda: None, *, machine: Machine | None = None
    ) -> None:
        self._factor, self._check, self._machine = factor, check, machine or ThisMachine()
        self._mark = Work(0.0, 0.0)
        self._owed = Work(0.0, 0.0)  # what the next pause repeats

    def begin(self, waited_s: float) -> None:
        """The next step begins now. `waited_s` is how long the learner has waited for others so far, in seconds."""
        self._mark = self._work(waited_s)

    def pause(self, waited_s: float) -> None:
        """After backward: repeat the work since the last pause, `factor` - 1 times."""
        self.end(waited_s)
        owed = Work(self._owed.core_s, max(0.0, self._owed.idle_s))  # waiting can be counted twice, never idle time
        self._repeat(self._machine.compute, owed.core_s)
        self._repeat(self._machine.sleep, owed.idle_s)
        done, before = self._work(waited_s), self._mark
        self._owed = Work(owed.core_s - done.core_s + before.core_s, owed.idle_s - done.idle_s + before.idle_s)
        self._mark = done

    def end(self, waited_s: float) -> None:
        """The step is over, and the next one begins."""
        before, self._mark = self._mark, self._work(waited_s)
        more, now, owed = self._factor - 1, self._mark, self._owed
        core_s = owed.core_s + more * (now.core_s - before.core_s)
        self._owed = Work(core_s, owed.idle_s + more * (now.idle_s - before.idle_s))

    def _work(self, waited_s: float) -> Work:
        """The work of this thread without waiting for others. Nothing is measured if nothing is to be repeated."""
        if self._factor == 1:
            return self._mark
        work = self._machine.work()
        return work._replace(idle_s=work.idle_s - waited_s)

    def _repeat(self, work: Callable[[float], None], seconds: float) -> None:
        while seconds > 0:
            work(min(seconds, BEAT_S))
            seconds -= BEAT_S
            self._check()
