"""Where the time of a learner's steps goes: computing, waiting for peers, and mixing."""

from __future__ import annotations

import time

from roundelay import waiting
from roundelay.clock import Steps


class StepTimes:
    """Drives the generators of a strategy, and adds up the time in which they wait and work.

    Attributes:
        steps: steps that this learner has taken since it was made, whatever the count of its weights.
        waited_s: seconds spent waiting for futures.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.steps = 0
        self.waited_s = self._mixed_s = 0.0

    def drive(self, steps: Steps) -> None:
        """Run a generator to its end; block on each future that it yields. Raises what the generator does not catch."""
        began, waited = time.perf_counter(), 0.0
        try:
            future = next(steps)
            while True:
                asked = time.perf_counter()
                try:
                    result = waiting.result(future)
                except BaseException as error:
                    waited += time.perf_counter() - asked
                    future = steps.throw(error)
                else:
                    waited += time.perf_counter() - asked
                    future = steps.send(result)
        except StopIteration:
            pass
        self.waited_s += waited
        self._mixed_s += time.perf_counter() - began - waited

    def metrics(self) -> dict[str, float]:
        """Seconds per step."""
        total, steps = time.perf_counter() - self._began, max(self.steps, 1)
        return {
            "step_s": total / steps,
            "compute_s": (total - self.waited_s - self._mixed_s) / steps,
            "wait_s": self.waited_s / steps,
            "mix_s": self._mixed_s / steps,
        }
