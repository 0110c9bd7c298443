"""How fast simulations are: stacked learners against one by one, and ten thousand learners without weights.

python benchmarks/simulation_speed.py stacked
python benchmarks/simulation_speed.py timing
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from roundelay.clock import VirtualClock
from roundelay.simulation import StackedLearners, VirtualLearner, run
from roundelay.simulation.compute import lognormal
from roundelay.simulation.network import Links
from roundelay.simulation.problems import Problem, digits, loss
from roundelay.simulation.timing import Remembered, timing
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, Strategy
from roundelay.topology import random_ring, ring
from roundelay.transport import SimulatedNetwork

LEARNERS, BATCH, STEPS, REPETITIONS = 128, 4, 20, 5
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "dpsgd ring": lambda: DPSGD(ring(LEARNERS)),
    "dpsgd random-ring": lambda: DPSGD(random_ring(LEARNERS)),
    "delay-by-one": DelayByOne,
    "allreduce": Allreduce,
}
MANY, MANY_STEPS = 10_000, 100


def optimizer(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


def stacked_s(problem: Problem, strategy: Strategy) -> float:
    """Seconds of STEPS steps, all learners at once."""
    shards = problem.shards(LEARNERS, seed=0)
    learners = StackedLearners(problem.module(0), loss, optimizer, strategy, LEARNERS)
    began = time.perf_counter()
    for step in range(STEPS):
        learners.step(shards.batch(step, BATCH))
    return time.perf_counter() - began


def looped_s(problem: Problem, strategies: list[Strategy]) -> float:
    """The same, one learner after the other on the virtual clock."""
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


def compare() -> None:
    """Interleaved repetitions; the median ratio with its range."""
    problem = digits()
    for name, strategy_of in STRATEGIES.items():
        ratios = []
        for _ in range(REPETITIONS):
            fast = stacked_s(problem, strategy_of())
            ratios.append(looped_s(problem, [strategy_of() for _ in range(LEARNERS)]) / fast)
        median, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{name:18} stacked {median:.1f} times faster ({low:.1f} to {high:.1f}), {LEARNERS} learners", flush=True)


def time_many() -> None:
    """Learners that exchange nothing but messages."""
    mixing = Remembered(random_ring(MANY))
    began, used = time.perf_counter(), time.process_time()
    done = timing(
        lambda rank: ADPSGD(mixing),
        MANY,
        steps=MANY_STEPS,
        compute=lognormal(0.3, 0.1),
        links=Links(5e-6, 12.5e9),
        model_bytes=165e6,
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{MANY} learners x {MANY_STEPS} steps: {time.perf_counter() - began:.1f} s, of it processor "
        f"{time.process_time() - used:.1f} s; peak memory {peak:.2f} GiB; {done.mean('exchanges_per_step'):.2f} exchanges a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["stacked", "timing"])
    torch.set_num_threads(1)
    {"stacked": compare, "timing": time_many}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
