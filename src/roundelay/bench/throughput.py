"""Steps per second of every strategy, against no communication at all and against DDP, measured in one run.

Repetitions are interleaved (every case once, then every case again), because these machines are shared and noisy; what is
reported are medians of ratios within a repetition.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roundelay.bench.cases import Case
from roundelay.bench.local import local_learners
from roundelay.errors import RoundelayError

EMULATED_STEP_S = {1_000_000: 0.02, 10_000_000: 0.2}
OURS = (
    ("allreduce", None, "shared-memory"),
    ("allreduce", None, "gloo"),
    ("delay-by-one", None, "shared-memory"),
    ("delay-by-one", None, "gloo"),
    ("dpsgd", "ring", "shared-memory"),
    ("dpsgd", "random-ring", "shared-memory"),
    ("dpsgd", "random-ring", "sockets"),
    ("adpsgd", "ring", "shared-memory"),
    ("adpsgd", "random-ring", "shared-memory"),
    ("adpsgd", "random-ring", "sockets"),
    ("adpsgd", "random-ring", "sockets-float32"),
)


@dataclass(frozen=True)
class Row:
    """One line of the result; ratios are medians over repetitions, the range beside them."""

    strategy: str
    topology: str | None
    transport: str | None
    compute: str
    parameters: int
    slow: float
    total_steps_per_s: float
    ratio_to_none: float
    ratio_to_none_range: tuple[float, float]
    ratio_to_ddp: float
    ratio_to_ideal: float
    exchanges_per_step: float


def cases_for(
    parameters: Sequence[int], *, slow: float = 1.0, slow_learner: int = 0, compute: str = "emulated"
) -> list[Case]:
    """Every strategy for every size, rivals first; with a straggler, what no communication would do without it too."""
    cases = []
    for count in parameters:
        step_s = EMULATED_STEP_S.get(count, 0.02)
        if slow > 1:
            cases.append(Case("none", None, None, count, step_s, 1.0, slow_learner, compute))
        for strategy, topology, transport in (("none", None, None), ("ddp", None, "gloo"), *OURS):
            cases.append(Case(strategy, topology, transport, count, step_s, slow, slow_learner, compute))
    return cases


def run(
    cases: Sequence[Case],
    *,
    learners: int,
    seconds: float,
    repetitions: int,
    progress: Callable[[Case], None] = lambda case: None,
) -> list[Row]:
    """Measure all cases `repetitions` times, interleaved, in the same learner processes."""
    plan = json.dumps({"cases": [case.asdict() for case in cases] * repetitions, "seconds": seconds})
    measured: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    with local_learners(learners, ["-m", "roundelay.bench.worker", plan]) as processes:
        first = processes[0].stdout
        assert first is not None
        for case in list(cases) * repetitions:
            line = first.readline()
            if not line:
                raise RoundelayError(f"a learner process ended while measuring {case}; its error stands above")
            per_learner = json.loads(line)
            steps = sum(row[0] for row in per_learner)
            rate = sum(row[0] / row[1] for row in per_learner)
            measured[case].append((rate, sum(row[2] for row in per_learner) / steps))
            progress(case)
    slow = max(case.slow for case in cases)
    return [_row(case, measured, learners) for case in cases if case.slow == slow]


def _row(case: Case, measured: dict[Case, list[tuple[float, float]]], learners: int) -> Row:
    """Ratios within each repetition, then their medians. Ideal: (n - 1 + 1/s)/n of a balanced run without communication."""
    rates = _rates(measured[case])
    to_none = _over(rates, _rates(measured[_rival(measured, case, "none", case.slow)]))
    to_balanced = _over(rates, _rates(measured[_rival(measured, case, "none", 1.0)]))
    to_ddp = _over(rates, _rates(measured[_rival(measured, case, "ddp", case.slow)]))
    ideal_share = (learners - 1 + 1 / case.slow) / learners
    return Row(
        strategy=case.strategy,
        topology=case.topology,
        transport=case.transport,
        compute=case.compute,
        parameters=case.parameters,
        slow=case.slow,
        total_steps_per_s=statistics.median(rates),
        ratio_to_none=statistics.median(to_none),
        ratio_to_none_range=(min(to_none), max(to_none)),
        ratio_to_ddp=statistics.median(to_ddp),
        ratio_to_ideal=statistics.median(to_balanced) / ideal_share,
        exchanges_per_step=statistics.median(exchanges for _, exchanges in measured[case]),
    )


def _rates(measured: list[tuple[float, float]]) -> list[float]:
    return [rate for rate, _ in measured]


def _over(rates: list[float], references: list[float]) -> list[float]:
    return [rate / reference for rate, reference in zip(rates, references, strict=True)]


def _rival(measured: dict[Case, Any], case: Case, strategy: str, slow: float) -> Case:
    return next(
        other
        for other in measured
        if (other.strategy, other.parameters, other.slow) == (strategy, case.parameters, slow)
    )
