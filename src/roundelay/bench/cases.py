"""What is measured, and how a learner process measures it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from roundelay.bench.models import build
from roundelay.cluster.environment import World
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, Strategy
from roundelay.topology import named

WARM_UP_STEPS = 10  # so that most connections, which are opened when first used, are there


@dataclass(frozen=True)
class Case:
    """One strategy in one setting.

    Attributes:
        strategy: "none" (no communication), "ddp" (torch's), or one of ours.
        topology: of dpsgd and adpsgd.
        transport: "shared-memory", or "sockets" ("sockets-float32": adpsgd in full precision), for collectives "gloo".
        parameters: of the model.
        step_s: emulated time of a step.
        slow: how many times slower learner `slow_learner` is; 1 for a balanced run.
        compute: "emulated" (sleep) or "lstm".
    """

    strategy: str
    topology: str | None
    transport: str | None
    parameters: int
    step_s: float
    slow: float
    slow_learner: int = 0
    compute: str = "emulated"

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def waits(self) -> bool:
        """Whether learners take equally many steps."""
        return self.strategy not in ("none", "adpsgd")


def make_strategy(case: Case, size: int) -> Strategy:
    """The strategy of a case that is one of ours."""
    makers: dict[str, Callable[[], Strategy]] = {
        "allreduce": Allreduce,
        "delay-by-one": DelayByOne,
        "dpsgd": lambda: DPSGD(named(case.topology or "ring", size)),
        "adpsgd": lambda: ADPSGD(
            named(case.topology or "ring", size), full_precision=case.transport == "sockets-float32"
        ),
    }
    return makers[case.strategy]()


def measure(case: Case, world: World, seconds: float) -> dict[str, float]:
    """Run one case for about `seconds`; this learner's steps, seconds and exchanges."""
    torch.manual_seed(0)
    slow = case.slow if world.rank == case.slow_learner else 1.0
    module, batch = build(case.compute, case.parameters, case.step_s, slow)
    runner: nn.Module = DistributedDataParallel(module) if case.strategy == "ddp" else module
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        runner(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    context: AbstractContextManager[Learner | None] = nullcontext()
    if case.strategy not in ("none", "ddp"):
        transport = world.transport(share_memory=case.transport == "shared-memory")
        context = Learner(module, optimizer, make_strategy(case, world.size), transport)
    with context as learner:
        for _ in range(WARM_UP_STEPS):
            step()
        dist.barrier()
        before = learner.metrics() if learner else {}
        began = time.perf_counter()
        steps = _run(step, case, seconds, began)
        elapsed = time.perf_counter() - began
        after = learner.metrics() if learner else {}
        dist.barrier()  # nobody leaves while others are being measured
    exchanges = after.get("exchanges_started", 0) - before.get("exchanges_started", 0)
    return {"steps": steps, "seconds": elapsed, "exchanges": exchanges}


def _run(step: Callable[[], None], case: Case, seconds: float, began: float) -> int:
    if case.waits:
        count = max(3, round(seconds / (case.step_s * case.slow)))
        for _ in range(count):
            step()
        return count
    count = 0
    while time.perf_counter() - began < seconds:
        step()
        count += 1
    return count
