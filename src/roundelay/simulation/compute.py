"""Models of compute time: pure functions (learner, step, now) -> seconds, some of which wrap another one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from roundelay.errors import RoundelayError, described
from roundelay.training.metrics import read_rows

Compute = Callable[[int, int, float], float]
"""Seconds that `learner` computes in its step number `step`, which begins at virtual time `now`."""

_MOST_LEARNERS = 1_000_000
BLOCK = 128  # steps drawn at once, because creating a generator costs as much as a hundred draws


def constant(seconds: float) -> Compute:
    """The same time for every step of every learner."""
    return lambda learner, step, now: seconds


def lognormal(mean_s: float, spread: float, seed: int = 0) -> Compute:
    """Independent times with mean `mean_s` and standard deviation `spread` x mean."""
    sigma2 = float(np.log1p(spread**2))

    drawn: dict[int, tuple[int, array[float]]] = {}  # by learner: number and times of its current block

    def seconds(learner: int, step: int, now: float) -> float:
        number, at = divmod(step, BLOCK)
        block = drawn.get(learner)
        if block is None or block[0] != number:
            rng = np.random.default_rng((seed, learner, number))
            block = number, array("d", mean_s * rng.lognormal(-sigma2 / 2, sigma2**0.5, BLOCK))
            drawn[learner] = block
        return block[1][at]

    return seconds


def slowed(base: Compute, factors: Mapping[int, float]) -> Compute:
    """Some learners are slower; `factors` gives the factor by learner.

    >>> slowed(constant(0.1), {0: 10})(0, 0, 0.0)
    1.0
    """
    return lambda learner, step, now: base(learner, step, now) * factors.get(learner, 1.0)


def slow_period(base: Compute, learner: int, factor: float, begin_s: float, end_s: float) -> Compute:
    """One learner is slower in the steps that begin between `begin_s` and `end_s`."""

    def seconds(rank: int, step: int, now: float) -> float:
        return base(rank, step, now) * (factor if rank == learner and begin_s <= now < end_s else 1.0)

    return seconds


def frozen(base: Compute, learner: int, at_s: float, for_s: float) -> Compute:
    """One learner freezes: its step that is under way at `at_s` takes `for_s` longer."""

    def seconds(rank: int, step: int, now: float) -> float:
        usual = base(rank, step, now)
        return usual + for_s if rank == learner and now <= at_s < now + usual else usual

    return seconds


def trace(seconds_of: Sequence[Sequence[float]]) -> Compute:
    """Measured times, one row for each learner; a row starts again after its last time.

    If there are more learners than rows, the rows are used again from the first.

    Raises RoundelayError if a row is empty or has a negative time.
    """
    for learner, row in enumerate(seconds_of):
        if not row or min(row) < 0:
            raise RoundelayError(
                f"the trace of learner {learner} needs step times of at least 0 s, got {list(row)[:5]}"
            )

    def seconds(learner: int, step: int, now: float) -> float:
        row = seconds_of[learner % len(seconds_of)]
        return row[step % len(row)]

    return seconds


def measured(metrics: Path) -> Compute:
    """The compute times of a real run, from its metrics.jsonl.

    Steps between two rows of a learner count as equally long. `train --set metrics.every_s=0` writes a row for every step.

    Raises RoundelayError if the file is no metrics file, if the run was resumed, because its rows do not begin at the first
    step, or if a learner has no row.
    """
    steps: dict[int, int] = {}
    computed_s: dict[int, float] = {}
    times: dict[int, list[float]] = {}
    for learner, step, mean_s in _rows(metrics):
        new = step - steps.get(learner, 0)
        if new > 0:
            times.setdefault(learner, []).extend([max(mean_s * step - computed_s.get(learner, 0.0), 0.0) / new] * new)
            steps[learner], computed_s[learner] = step, mean_s * step
    if not times:
        raise RoundelayError(f"'{metrics}' has no row of a learner; give metrics.jsonl of a run")
    return trace([times.get(learner, []) for learner in range(max(times) + 1)])


def _rows(metrics: Path) -> list[tuple[int, int, float]]:
    """For every row of a learner: the learner, its steps, and the mean compute time of these steps."""
    try:
        rows = list(read_rows(metrics))
        if any(row.get("event") == "resumed" for row in rows):
            raise RoundelayError(
                f"'{metrics}' belongs to a resumed run, so its first steps are missing; give a run that was not resumed"
            )
        found = [(int(r["learner"]), int(r["steps"]), float(r["compute_s"])) for r in rows if r["kind"] == "learner"]
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise RoundelayError(f"'{metrics}' is no metrics file of a run: {described(error)}") from None
    for row in found:
        if not (0 <= row[0] < _MOST_LEARNERS and row[1] >= 0 and 0 <= row[2] < math.inf):
            raise RoundelayError("'{}' has a row of learner {} with {} steps of {:g} s".format(metrics, *row))
    return found
