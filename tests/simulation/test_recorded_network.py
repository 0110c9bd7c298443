"""The simulator beside measured figures: `roundelay bench network`, as recorded in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from roundelay.bench.network import STRATEGIES, Row, Settings, Strategy
from roundelay.bench.network_results import read
from roundelay.bench.network_worker import WARM_UP_STEPS
from roundelay.clock import VirtualClock
from roundelay.simulation.learners import VirtualLearner
from roundelay.simulation.network import Links, ModelledNetwork
from roundelay.strategies.registry import strategy_named

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-18-network.json"
MEASURED_S = (
    15.0  # per case; figures of adpsgd at 50 Mbit/s fall for longer, because the first 16 steps wait for nothing
)
WEIGHTS = 4096  # stand for the recorded model; links are slower in proportion
PAYLOAD = 0.95  # of the bytes that tc counts: the rest is the headers of Ethernet, IP and TCP
# On the complete graph measured learners wait in every round, so each has begun it itself: probably they differ by less than
# an outer step takes. The simulator's outer step takes no time: with a skew of 1e-3 the first learner asks the others a moment
# before they are there, and these go on without waiting.
SKEW = 1e-6
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

rows = [row for row in read(RECORDED) if row.rate != "none" and row.strategy != "none"]


def bytes_per_s(rate: str) -> float:
    return float(rate[:-4]) * BITS[rate[-4:]] / 8


def simulated(strategy: Strategy, rate: str, step_s: float) -> float:
    """Steps per second of all learners, counted as the benchmark counts them."""
    settings = Settings([rate], step_s=step_s)
    case, clock = settings.case(strategy), VirtualClock()
    links = Links(1e-4, PAYLOAD * bytes_per_s(rate) * WEIGHTS / settings.parameters)
    network = ModelledNetwork(clock, settings.learners, links)
    started: list[list[float]] = [[] for _ in range(settings.learners)]
    for rank, times in enumerate(started):
        module = torch.nn.Linear(WEIGHTS, 1, bias=False)
        module.weight.grad = torch.zeros_like(module.weight)
        made = strategy_named("allreduce" if strategy.name == "ddp" else strategy.name, **case["options"])
        learner = VirtualLearner(
            module,
            torch.optim.SGD(module.parameters(), lr=0.0),
            made,
            network.transports[rank],
            lambda step, times=times: times.append(clock.now()),
            lambda step, rank=rank: step_s * (1 + SKEW * rank),
        )
        clock.spawn(learner.process())
    clock.run(until=150.0)
    return sum(speed(times, case["least_steps"], synchronous=made.synchronous) for times in started)


def speed(times: list[float], least: int, *, synchronous: bool) -> float:
    first = WARM_UP_STEPS
    if synchronous:
        last = first + max(2, round(MEASURED_S / (times[first] - times[first - 1])))
    else:
        enough = (k for k, at in enumerate(times) if at >= times[first] + MEASURED_S and k >= first + least)
        last = next(enough, len(times) - 1)
    last = min(last, len(times) - 1)
    return (last - first) / (times[last] - times[first])


def predicted(row: Row) -> float:
    strategy = next(each for each in STRATEGIES if each.label == row.strategy)
    return simulated(strategy, row.rate, step_s=4 * row.ratio_to_none / row.steps_per_s)


# Messages between pairs take two thirds of a round here. In the simulator every learner waits for them in every round, in the
# measured run some did not: its learners were probably not in step.
OUT_OF_STEP = [("50mbit", "local-sgd pairs")]


@pytest.fixture(scope="module")
def predictions():
    return {(row.rate, row.strategy): predicted(row) for row in rows}


@pytest.mark.parametrize("row", rows, ids=lambda row: f"{row.rate}-{row.strategy}")
def test_the_simulator_predicts_the_measured_steps_per_second(row, predictions):
    tolerance = 0.2 if (row.rate, row.strategy) in OUT_OF_STEP else 0.15
    assert predictions[row.rate, row.strategy] == pytest.approx(row.steps_per_s, rel=tolerance)


@pytest.mark.parametrize("rate", dict.fromkeys(row.rate for row in rows))
def test_the_simulator_predicts_the_order_of_the_strategies(rate, predictions):
    """Of any two whose measured speeds differ by more than a third."""
    found = [(row.steps_per_s, predictions[rate, row.strategy]) for row in rows if row.rate == rate]
    for slow, slow_predicted in found:
        for fast, fast_predicted in found:
            assert fast < 4 / 3 * slow or fast_predicted > slow_predicted


def test_the_recorded_figures_are_of_the_default_settings():
    settings, recorded = Settings([]), json.loads(RECORDED.read_text())["settings"]
    assert recorded == {name: getattr(settings, name) for name in recorded}
