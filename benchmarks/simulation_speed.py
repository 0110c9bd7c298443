"""How much faster stacked learners are than the same learners one by one on the virtual clock.

python benchmarks/simulation_speed.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from roundelay.clock import VirtualClock
from roundelay.simulation import StackedLearners, VirtualLearner, run
from roundelay.simulation.problems import Problem, digits, loss
from roundelay.simulation.stacked import StackedAllreduce, StackedDelayByOne, StackedDPSGD, StackedStrategy
from roundelay.strategies import DPSGD, Allreduce, DelayByOne, Strategy
from roundelay.topology import random_ring, ring
from roundelay.transport import SimulatedNetwork

LEARNERS, BATCH, STEPS, REPETITIONS = 128, 4, 20, 5
STRATEGIES: dict[str, tuple[Callable[[], StackedStrategy], Callable[[], Strategy]]] = {
    "dpsgd ring": (lambda: StackedDPSGD(ring(LEARNERS)), lambda: DPSGD(ring(LEARNERS))),
    "dpsgd random-ring": (lambda: StackedDPSGD(random_ring(LEARNERS)), lambda: DPSGD(random_ring(LEARNERS))),
    "delay-by-one": (StackedDelayByOne, DelayByOne),
    "allreduce": (StackedAllreduce, Allreduce),
}


def optimizer(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


def stacked_s(problem: Problem, strategy: StackedStrategy) -> float:
    """Seconds that STEPS steps take with all learners at once."""
    shards = problem.shards(LEARNERS, seed=0)
    learners = StackedLearners(problem.module(0), loss, optimizer, strategy, LEARNERS)
    began = time.perf_counter()
    for step in range(STEPS):
        learners.step(shards.batch(step, BATCH))
    return time.perf_counter() - began


def one_by_one_s(problem: Problem, strategies: list[Strategy]) -> float:
    """Seconds that the same steps take one learner after the other, on the virtual clock."""
    shards, clock = problem.shards(LEARNERS, seed=0), VirtualClock()
    network, learners = SimulatedNetwork(clock, LEARNERS, latency_s=0.01), []
    for rank, strategy in enumerate(strategies):
        module = problem.module(0)
        own = optimizer(list(module.parameters()))

        def gradient(step: int, rank: int = rank, module: nn.Module = module) -> None:
            module.zero_grad()
            loss(module, shards.own(rank, step, BATCH)).backward()

        learners.append(VirtualLearner(module, own, strategy, network.transports[rank], gradient, lambda step: 1.0))
    began = time.perf_counter()
    run(clock, learners, STEPS)
    return time.perf_counter() - began


def main() -> None:
    """Interleave repetitions; print the median ratio with its range."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    problem = digits()
    for name, (stacked_of, strategy_of) in STRATEGIES.items():
        ratios = []
        for _ in range(REPETITIONS):
            fast = stacked_s(problem, stacked_of())
            ratios.append(one_by_one_s(problem, [strategy_of() for _ in range(LEARNERS)]) / fast)
        median, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{name:18} stacked {median:.1f} times faster ({low:.1f} to {high:.1f}), {LEARNERS} learners", flush=True)


if __name__ == "__main__":
    main()
