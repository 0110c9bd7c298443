"""Does `adpsgd` on an accelerator hide its copies? Overlapped copies beside synchronous ones and no communication.

Without CUDA the accelerator is emulated: computation is a sleep, copies take their time in a thread of their own.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from roundelay import devices
from roundelay.bench.local import local_learners
from roundelay.errors import RoundelayError

PARAMETERS = 43_000_000  # the papers' acoustic model: 165 MiB
STEP_S = 0.3
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        strategy: "none" (no communication) or "adpsgd".
        copies: between host and device: "overlapped" with computation, or "synchronous"; "none" if there are none.
        transport: "shared-memory" or "sockets"; "none" if there is none.
    """

    strategy: str
    copies: str
    transport: str


NONE = Case("none", "none", "none")
CASES = (
    NONE,
    Case("adpsgd", "overlapped", "shared-memory"),
    Case("adpsgd", "overlapped", "sockets"),
    Case("adpsgd", "synchronous", "shared-memory"),
)


@dataclass(frozen=True)
class Row:
    """One line of the result: medians over repetitions.

    Attributes:
        steps_per_s: of all learners together.
        ratio_to_none: steps_per_s divided by that without communication, in the same repetition.
        exchanges_per_step: own exchanges that a learner has finished, per step.
        device_copies: additional memory on the device, in models.
        host_copies: memory of the host, in models; None with shared memory, because two processes map the same pages.
    """

    strategy: str
    copies: str
    transport: str
    steps_per_s: float
    ratio_to_none: float
    ratio_to_none_range: tuple[float, float]
    exchanges_per_step: float
    device_copies: float
    host_copies: float | None


def note() -> str:
    """One sentence: what is real in this measurement, and what is emulated."""
    if names := devices.names():
        return f"Weights, copies and optimizer are on {names[0]}; the computation of a step is emulated by a sleep."
    return (
        "The accelerator is emulated: computation is a sleep, from which the time of the optimizer on the CPU is deducted, and "
        "copies between host and device take their time in a thread of their own."
    )


def run(
    *,
    learners: int,
    parameters: int,
    step_s: float,
    bandwidth_Bps: float,
    seconds: float,
    repetitions: int,
    progress: Callable[[Case], None] = lambda case: None,
) -> list[Row]:
    """Measure all cases `repetitions` times, interleaved, in the same learner processes.

    Raises RoundelayError if a learner process ends early.
    """
    plan = {
        "cases": [asdict(case) for case in CASES] * repetitions,
        "parameters": parameters,
        "step_s": step_s,
        "bandwidth_Bps": bandwidth_Bps,
        "seconds": seconds,
    }
    measured: dict[Case, list[list[dict[str, float]]]] = {case: [] for case in CASES}
    with local_learners(learners, ["-m", "roundelay.bench.accelerator_worker", json.dumps(plan)]) as processes:
        results = processes[0].stdout
        assert results is not None
        for case in CASES * repetitions:
            line = results.readline()
            if not line:
                raise RoundelayError(f"a learner process ended while it measured {case}; its error is above")
            measured[case].append(json.loads(line))
            progress(case)
    return [row(case, measured, parameters * BYTES_PER_PARAMETER) for case in CASES]


def row(case: Case, measured: Mapping[Case, Sequence[Sequence[Mapping[str, float]]]], model_bytes: int) -> Row:
    """The row of a case, from what every learner has measured in every repetition."""
    rates = list(map(_steps_per_s, measured[case]))
    ratios = [rate / _steps_per_s(none) for rate, none in zip(rates, measured[NONE], strict=True)]
    learners = [learner for repetition in measured[case] for learner in repetition]
    host = max(learner["host_bytes"] for learner in learners) / model_bytes
    return Row(
        case.strategy,
        case.copies,
        case.transport,
        steps_per_s=statistics.median(rates),
        ratio_to_none=statistics.median(ratios),
        ratio_to_none_range=(min(ratios), max(ratios)),
        exchanges_per_step=statistics.median(map(_exchanges_per_step, measured[case])),
        device_copies=max(learner["device_bytes"] for learner in learners) / model_bytes,
        host_copies=None if case.transport == "shared-memory" else host,
    )


def _steps_per_s(learners: Sequence[Mapping[str, float]]) -> float:
    return sum(learner["steps"] / learner["seconds"] for learner in learners)


def _exchanges_per_step(learners: Sequence[Mapping[str, float]]) -> float:
    return sum(learner["exchanges"] for learner in learners) / sum(learner["steps"] for learner in learners)
