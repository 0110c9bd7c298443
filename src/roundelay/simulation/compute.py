"""How long a step takes: (learner, step, now) -> seconds, pure functions that can be put around each other."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from roundelay.errors import RoundelayError
from roundelay.training.metrics import read_rows

Compute = Callable[[int, int, float], float]
"""Seconds that `learner` computes in its own `step`, begun at virtual time `now`."""

BLOCK = 128  # steps drawn at once: a generator costs as much as a hundred draws


def constant(seconds: float) -> Compute:
    """Always the same."""
    return lambda learner, step, now: seconds


def lognormal(mean_s: float, spread: float, seed: int = 0) -> Compute:
    """Independent from step to step, with standard deviation `spread` x mean."""
    sigma2 = float(np.log1p(spread**2))

    drawn: dict[int, tuple[int, array[float]]] = {}  # of each learner: the block it is in

    def seconds(learner: int, step: int, now: float) -> float:
        number, place = divmod(step, BLOCK)
        block = drawn.get(learner)
        if block is None or block[0] != number:
            rng = np.random.default_rng((seed, learner, number))
            block = number, array("d", mean_s * rng.lognormal(-sigma2 / 2, sigma2**0.5, BLOCK))
            drawn[learner] = block
        return block[1][place]

    return seconds


def slowed(base: Compute, factors: Mapping[int, float]) -> Compute:
    """Some learners are slower, each by its own factor.

    >>> slowed(constant(0.1), {0: 10})(0, 0, 0.0)
    1.0
    """
    return lambda learner, step, now: base(learner, step, now) * factors.get(learner, 1.0)


def slow_period(base: Compute, learner: int, factor: float, begin_s: float, end_s: float) -> Compute:
    """One learner is slower for a while: steps begun between `begin_s` and `end_s`."""

    def seconds(who: int, step: int, now: float) -> float:
        return base(who, step, now) * (factor if who == learner and begin_s <= now < end_s else 1.0)

    return seconds


def frozen(base: Compute, learner: int, at_s: float, for_s: float) -> Compute:
    """One learner stands still: the step that it is in at `at_s` takes so much longer."""

    def seconds(who: int, step: int, now: float) -> float:
        usual = base(who, step, now)
        return usual + for_s if who == learner and now <= at_s < now + usual else usual

    return seconds


def trace(seconds_of: Sequence[Sequence[float]]) -> Compute:
    """Times that were measured, one row a learner; after the last step it begins again.

    Raises RoundelayError if a learner has none.
    """
    for learner, row in enumerate(seconds_of):
        if not row or min(row) < 0:
            raise RoundelayError(f"the trace of learner {learner} needs step times of at least 0, got {list(row)[:5]}")

    def seconds(learner: int, step: int, now: float) -> float:
        row = seconds_of[learner % len(seconds_of)]
        return row[step % len(row)]

    return seconds


def measured(metrics: Path) -> Compute:
    """The trace of a real run, from its metrics.jsonl: what each learner computed from one of its rows to the next.

    Steps between two rows count as equally long, so `--set metrics.every_s=0`, a row for every step, tells most.

    Raises RoundelayError if the run was resumed, for then the rows do not begin at its first step, or if a learner is missing.
    """
    steps: dict[int, int] = {}
    computed_s: dict[int, float] = {}
    times: dict[int, list[float]] = {}
    for row in read_rows(metrics):
        if row.get("event") == "resumed":
            raise RoundelayError(f"'{metrics}' is of a run that was resumed; give one that was not")
        if row["kind"] != "learner" or row["steps"] == steps.get(row["learner"], 0):
            continue
        learner, total_s = row["learner"], row["compute_s"] * row["steps"]
        new = row["steps"] - steps.get(learner, 0)
        times.setdefault(learner, []).extend([max(total_s - computed_s.get(learner, 0.0), 0.0) / new] * new)
        steps[learner], computed_s[learner] = row["steps"], total_s
    return trace([times.get(learner, []) for learner in range(max(times, default=0) + 1)])
