"""Hundredths of throughput: a few cases of `roundelay bench throughput`, many repetitions of each, with standard errors.

    python benchmarks/few_cases.py --repetitions 30 none ddp "adpsgd random-ring shared-memory" "adpsgd random-ring sockets"

1 M parameters, 20 ms, four equally fast learners. A repetition is a pair of ratios that differ by some hundredths from the next
one, so that seven of them do not tell 0.94 from 0.96.
"""

from __future__ import annotations

import argparse
import json
import statistics

from roundelay.bench.cases import Case
from roundelay.bench.local import local_learners

LEARNERS, PARAMETERS, STEP_S = 4, 1_000_000, 0.02


def case_of(name: str) -> Case:
    """A case by its strategy, topology and transport."""
    strategy, *where = name.split()
    transport = where.pop() if where else None
    return Case(strategy, where[0] if where else None, transport, PARAMETERS, STEP_S, slow=1.0)


def steps_per_s(names: list[str], repetitions: int, seconds: float) -> dict[str, list[float]]:
    """Of all learners together, in every repetition, interleaved."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    plan = json.dumps({"cases": [case_of(name).asdict() for name in names] * repetitions, "seconds": seconds})
    with local_learners(LEARNERS, ["-m", "roundelay.bench.worker", plan]) as processes:
        assert processes[0].stdout
        for name in names * repetitions:
            learners = json.loads(processes[0].stdout.readline())
            rates[name].append(sum(steps / elapsed for steps, elapsed, _ in learners))
    return rates


def main() -> None:
    """Print what each case has of the first one, and of DDP where that is among them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", help="strategy, topology and transport as in the table of the benchmark")
    parser.add_argument("--repetitions", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    rates = steps_per_s(arguments.cases, arguments.repetitions, arguments.seconds)
    references = dict.fromkeys([arguments.cases[0], *(name for name in rates if name == "ddp")])
    for name, mine in rates.items():
        print(f"{name:36}", *(f"/ {other}: {_ratio(mine, rates[other])}" for other in references), sep="   ")


def _ratio(mine: list[float], others: list[float]) -> str:
    """Within each repetition; then the median, and the mean with its standard error."""
    ratios = [rate / reference for rate, reference in zip(mine, others, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"median {statistics.median(ratios):.3f}  mean {statistics.mean(ratios):.3f} +- {error:.3f}"


if __name__ == "__main__":
    main()
