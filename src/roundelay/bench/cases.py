"""A case of the throughput benchmark, and how one learner process measures it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from roundelay.bench.models import build
from roundelay.cluster.environment import World
from roundelay.learner import Learner
from roundelay.strategies.registry import strategy_named
from roundelay.training.slowdown import Slowdown

NO_COMMUNICATION, DDP = "none", "ddp"
WARM_UP_STEPS = 10  # most connections are opened by the first exchange with a peer


@dataclass(frozen=True)
class Case:
    """One strategy in one setting.

    Attributes:
        strategy: "none" (no communication), "ddp" (torch's), or the name of a strategy.
        topology: its name; None for strategies that take none.
        transport: "shared-memory" or "sockets" for exchanges, "gloo" for collectives.
        wire: dtype of weights on sockets; None sends them as they are.
        parameters: number of weights of the model.
        step_s: emulated time of a step.
        slow: how many times slower learner `slow_learner` is; 1 if all learners are equal.
        compute: "emulated" (sleep) or "lstm".
    """

    strategy: str
    topology: str | None = None
    transport: str | None = None
    wire: str | None = None
    parameters: int = 1_000_000
    step_s: float = 0.02
    slow: float = 1.0
    slow_learner: int = 0
    compute: str = "emulated"


@dataclass(frozen=True)
class Measurement:
    """Steps of one learner in `seconds`, and the exchanges that it started in them."""

    steps: int
    seconds: float
    exchanges: float


def measure(case: Case, world: World, seconds: float) -> Measurement:
    """Run a case for about `seconds` in this process. All learners of `world` call this together."""
    torch.manual_seed(0)
    slow = case.slow if world.rank == case.slow_learner else 1.0
    real = case.compute == "lstm"  # an emulated step sleeps, and a slow one sleeps longer
    module, batch = build(case.compute, case.parameters, case.step_s if real else slow * case.step_s)
    slowdown = Slowdown(slow if real else 1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    synchronous, runner = case.strategy == DDP, module
    context: AbstractContextManager[Learner | None] = nullcontext()
    if case.strategy == DDP:
        runner = DistributedDataParallel(module)
    elif case.strategy != NO_COMMUNICATION:
        strategy = strategy_named(case.strategy, topology=case.topology, wire=case.wire)
        synchronous = strategy.synchronous
        transport = world.transport(share_memory=case.transport == "shared-memory")
        context = Learner(module, optimizer, strategy, transport)

    def step() -> None:
        runner(batch()).sum().backward()
        slowdown.pause(_waited_s(learner))
        optimizer.step()
        optimizer.zero_grad()

    slowdown.begin(0.0)
    with context as learner:
        for _ in range(WARM_UP_STEPS):
            step()
        dist.barrier()
        slowdown.begin(_waited_s(learner))
        before = _exchanges(learner)
        began = time.perf_counter()
        steps = _equal_steps(step, case, seconds) if synchronous else _steps_until(step, began + seconds)
        elapsed_s = time.perf_counter() - began
        exchanges = _exchanges(learner) - before
        dist.barrier()  # no learner leaves while others are being measured
    return Measurement(steps, elapsed_s, exchanges)


def _waited_s(learner: Learner | None) -> float:
    return learner.waited_s if learner else 0.0


def _exchanges(learner: Learner | None) -> float:
    return learner.metrics().get("exchanges_started", 0) if learner else 0


def _equal_steps(step: Callable[[], None], case: Case, seconds: float) -> int:
    """Take a fixed number of steps, because learners that wait for each other must take equally many."""
    count = max(3, round(seconds / (case.step_s * case.slow)))
    for _ in range(count):
        step()
    return count


def _steps_until(step: Callable[[], None], end: float) -> int:
    count = 0
    while time.perf_counter() < end:
        step()
        count += 1
    return count
