"""Whose turn it is on the cores: communication gives way to computation, and starves nowhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

NICENESS = 10  # a tenth of a core's time where computation wants it all: exchanges get thinner there, but never starve
PATIENCE_S = 0.1
FIRST_HURRY, LONGEST_HURRY = 2**9, 2**16  # requests


class Turns:
    """Whether threads that exchange weights are patient or hurry.

    Patient ones run on cores that nobody else wants (SCHED_IDLE): whoever wakes up to compute has such a core at once, where it
    would wait for others. Where computation leaves no core free they would starve, and with them whoever needs what they hold.
    So when a patient request had to wait for its turn, the next ones hurry, as threads of low priority: 512 of them, then
    patience is tried again, and twice as many each further time.

    >>> turns = Turns()
    >>> turns.waited(0.001)
    >>> turns.patient
    True
    >>> turns.waited(0.3)
    >>> turns.patient
    False
    """

    def __init__(self) -> None:
        self.patient = False  # until the first request, which may wait for all that is being set up
        self._hurried, self._hurry = 0, FIRST_HURRY

    def waited(self, seconds: float) -> None:
        """A request has begun so long after it was asked for."""
        if not self.patient:
            self._hurried -= 1
            self.patient = self._hurried <= 0
        elif seconds > PATIENCE_S:
            self.patient = False
            self._hurried, self._hurry = self._hurry, min(2 * self._hurry, LONGEST_HURRY)


def give_way(*, patient: bool) -> None:
    """Let the calling thread be patient, or of low priority. For good: only a privileged one could take it back."""
    if sys.platform == "linux":  # where every thread has a priority of its own
        thread = threading.get_native_id()
        with contextlib.suppress(PermissionError):  # a container may keep us from both
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
            if patient:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
