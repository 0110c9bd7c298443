"""Steps per second of every strategy, beside no communication and DDP, all measured in one run.

Speeds of a shared machine vary. So repetitions are interleaved (every case once, then every case again), ratios are taken
within a repetition, and their medians are reported.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roundelay.bench.cases import DDP, NO_COMMUNICATION, Case
from roundelay.bench.local import local_learners
from roundelay.errors import RoundelayError

EMULATED_STEP_S = {1_000_000: 0.02, 10_000_000: 0.2}
REFERENCES = (Case(NO_COMMUNICATION), Case(DDP, transport="gloo"))
STRATEGIES = (
    Case("allreduce", transport="gloo"),
    Case("delay-by-one", transport="gloo"),
    Case("dpsgd", "random-ring", "shared-memory"),
    Case("dpsgd", "random-ring", "sockets"),
    Case("adpsgd", "random-ring", "shared-memory"),
    Case("adpsgd", "random-ring", "sockets"),
    Case("adpsgd", "random-ring", "sockets", wire="bfloat16"),
)


@dataclass(frozen=True)
class Rates:
    """One repetition of a case: steps per second of all learners together, and exchanges per step."""

    steps_per_s: float
    exchanges_per_step: float


Measured = Mapping[Case, Sequence[Rates]]


@dataclass(frozen=True)
class Row:
    """One line of the result. Ratios are medians over repetitions."""

    strategy: str
    topology: str | None
    transport: str | None
    wire: str | None
    compute: str
    parameters: int
    slow: float
    total_steps_per_s: float
    ratio_to_none: float
    ratio_to_none_range: tuple[float, float]
    ratio_to_ddp: float
    ratio_to_ideal: float
    exchanges_per_step: float

    @property
    def name(self) -> str:
        """Strategy, topology, transport and wire in short form."""
        through = " ".join(filter(None, (self.transport, self.wire)))
        return " ".join(filter(None, (self.strategy, self.topology, f"({through})" if through else None)))


def cases_for(
    parameters: Sequence[int], *, slow: float = 1.0, slow_learner: int = 0, compute: str = "emulated"
) -> list[Case]:
    """All cases for every model size, references first. With a straggler, no communication is measured without it too."""
    cases = []
    for count in parameters:
        setting: dict[str, Any] = {
            "parameters": count,
            "step_s": EMULATED_STEP_S.get(count, 0.02),
            "slow_learner": slow_learner,
            "compute": compute,
        }
        if slow > 1:
            cases.append(replace(Case(NO_COMMUNICATION), **setting))
        cases += [replace(case, slow=slow, **setting) for case in (*REFERENCES, *STRATEGIES)]
    return cases


def run(
    cases: Sequence[Case],
    *,
    learners: int,
    seconds: float,
    repetitions: int,
    progress: Callable[[Case], None] = lambda case: None,
) -> list[Row]:
    """Measure all cases `repetitions` times, interleaved, in the same learner processes.

    Raises RoundelayError if a learner process ends early.
    """
    plan = json.dumps({"cases": [dataclasses.asdict(case) for case in cases] * repetitions, "seconds": seconds})
    measured: dict[Case, list[Rates]] = {case: [] for case in cases}
    with local_learners(learners, ["-m", "roundelay.bench.worker", plan]) as processes:
        results = processes[0].stdout
        assert results is not None
        for case in list(cases) * repetitions:
            line = results.readline()
            if not line:
                raise RoundelayError(f"a learner process ended while it measured {case}; its error is above")
            measured[case].append(_rates(json.loads(line)))
            progress(case)
    slow = max(case.slow for case in cases)
    return [_row(case, measured, learners) for case in cases if case.slow == slow]


def _rates(learners: Sequence[Mapping[str, float]]) -> Rates:
    steps_per_s = sum(learner["steps"] / learner["seconds"] for learner in learners)
    exchanges = sum(learner["exchanges"] for learner in learners) / sum(learner["steps"] for learner in learners)
    return Rates(steps_per_s, exchanges)


def _row(case: Case, measured: Measured, learners: int) -> Row:
    """Medians of the ratios. Ideal: (n - 1 + 1/s)/n of what equal learners reach without communication."""
    to_none = _ratios(case, measured, NO_COMMUNICATION, case.slow)
    to_ddp = _ratios(case, measured, DDP, case.slow)
    to_equal = _ratios(case, measured, NO_COMMUNICATION, slow=1.0)
    ideal = (learners - 1 + 1 / case.slow) / learners
    return Row(
        strategy=case.strategy,
        topology=case.topology,
        transport=case.transport,
        wire=case.wire,
        compute=case.compute,
        parameters=case.parameters,
        slow=case.slow,
        total_steps_per_s=statistics.median(rates.steps_per_s for rates in measured[case]),
        ratio_to_none=statistics.median(to_none),
        ratio_to_none_range=(min(to_none), max(to_none)),
        ratio_to_ddp=statistics.median(to_ddp),
        ratio_to_ideal=statistics.median(to_equal) / ideal,
        exchanges_per_step=statistics.median(rates.exchanges_per_step for rates in measured[case]),
    )


def _ratios(case: Case, measured: Measured, reference: str, slow: float) -> list[float]:
    """Throughput of the case over that of a reference, in each repetition."""
    wanted = (reference, case.parameters, slow)
    other = next(other for other in measured if (other.strategy, other.parameters, other.slow) == wanted)
    pairs = zip(measured[case], measured[other], strict=True)
    return [rates.steps_per_s / rates_of_other.steps_per_s for rates, rates_of_other in pairs]
