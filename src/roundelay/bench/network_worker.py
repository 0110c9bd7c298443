"""One learner process of `roundelay bench network`. Its argument is JSON: the cases, and where snapshots go.

All learners measure the cases in order. Learner 0 prints one line per case: a JSON list with the measurement of each learner.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from roundelay.bench.models import EmulatedModel
from roundelay.bench.namespaces import INTERFACE
from roundelay.cluster import environment
from roundelay.cluster.environment import World
from roundelay.language.task import Characters, CharactersConfig
from roundelay.learner import Learner
from roundelay.strategies.registry import strategy_named

Case = dict[str, Any]
WARM_UP_STEPS = 2
SNAPSHOTS = 20  # of a training run, evenly over its time
# A GPT of 0.4 million parameters and 128 characters per step: a step computes for about 15 ms on half a core, and DDP sends
# for 0.4 s at 50 Mbit/s. Without a GPU, a larger batch would make computation as slow as the links.
SIZES = {"layers": 2, "context": 64}
BATCH, LEARNING_RATE, CLIP = 2, 2e-3, 1.0
SENT = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")  # of this machine, whatever sends


def main() -> None:
    """Measure all cases of the command line."""
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    world = environment.init()
    for number, case in enumerate(plan["cases"]):
        own = measure(case, world, Path(plan["folder"]) / f"{plan['rate']}-{number}")
        gathered: list[Any] = [None] * world.size
        dist.all_gather_object(gathered, own)
        if world.rank == 0:
            sys.stdout.write(json.dumps(gathered) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


def measure(case: Case, world: World, snapshots: Path) -> dict[str, float]:
    """Run one case in this process: {"steps", "seconds", "bytes"}. All learners call this together."""
    torch.manual_seed(case["seed"])
    slow = case["slow"] if world.rank == 0 else 1.0
    module, optimizer, gradient = (_language if case["compute"] == "language" else _emulated)(case, world, slow)
    runner, synchronous = module, case["strategy"] == "ddp"
    context: AbstractContextManager[Learner | None] = nullcontext()
    if synchronous:
        runner = DistributedDataParallel(module)
    elif case["strategy"] != "none":
        strategy = strategy_named(case["strategy"], **case["options"])
        synchronous = strategy.synchronous
        context = Learner(module, optimizer, strategy, world.transport())

    def step() -> None:
        gradient(runner)
        optimizer.step()
        optimizer.zero_grad()

    with context:
        count = None
        for _ in range(WARM_UP_STEPS):
            began = time.perf_counter()
            step()
        if synchronous:
            # Learners that wait for each other must take equally many steps. No barrier here: it would give them the time to
            # receive what they send during the last step, and the first measured step would not wait for it.
            step_s = torch.tensor(time.perf_counter() - began)
            dist.broadcast(step_s, 0)
            count = max(2, round(case["seconds"] / float(step_s)))
        else:
            dist.barrier()
        save = snapshots if case["compute"] == "language" else None
        measured = _steps(
            step, case["seconds"], count, case["least_steps"] / slow, lambda k: _snapshot(module, save, world.rank, k)
        )
        dist.barrier()  # no learner leaves while others are being measured
    return measured


def _steps(
    step: Callable[[], None], seconds: float, count: int | None, least: float, snapshot: Callable[[int], None]
) -> dict[str, float]:
    """Take `count` steps; if it is None, steps for `seconds`, and at least `least`. Snapshots are taken at equal times."""
    began, sent, taken, saved = time.perf_counter(), int(SENT.read_text()), 0, 0
    while taken < (least if count is None else count) or (count is None and time.perf_counter() < began + seconds):
        step()
        taken += 1
        elapsed_s = time.perf_counter() - began
        while saved < min(SNAPSHOTS, int(elapsed_s * SNAPSHOTS / seconds)):
            saved += 1
            snapshot(saved)
    elapsed_s = time.perf_counter() - began
    while saved < SNAPSHOTS:
        saved += 1
        snapshot(saved)
    return {"steps": taken, "seconds": elapsed_s, "bytes": int(SENT.read_text()) - sent}


def _snapshot(module: nn.Module, path: Path | None, rank: int, number: int) -> None:
    if path is not None:
        torch.save(parameters_to_vector(module.parameters()).detach(), f"{path}-{number}-{rank}.pt")


Training = tuple[nn.Module, torch.optim.Optimizer, Callable[[nn.Module], None]]
"""The module, its optimizer, and a function that fills the gradients of the module, or of its DDP wrapper."""


def _emulated(case: Case, world: World, slow: float) -> Training:
    """Weights whose step sleeps, as the CPU does while an accelerator computes."""
    module = EmulatedModel(case["parameters"], case["step_s"] * slow)

    def gradient(runner: nn.Module) -> None:
        runner(torch.ones(1, requires_grad=True)).sum().backward()

    return module, torch.optim.SGD(module.parameters(), lr=1e-3), gradient


def language_task(data: str) -> Characters:
    """A small GPT on the characters of a text."""
    return Characters(CharactersConfig(data=data, **SIZES), seed=0)


def _language(case: Case, world: World, slow: float) -> Training:
    """The small GPT with AdamW, at one learning rate for all strategies. A slow learner also sleeps."""
    task = language_task(case["data"])
    module = task.module()
    optimizer = torch.optim.AdamW(task.parameter_groups(module), lr=LEARNING_RATE, weight_decay=0.1)
    generator = torch.Generator().manual_seed(case["seed"] * world.size + world.rank)

    def gradient(runner: nn.Module) -> None:
        began = time.perf_counter()
        samples = torch.randint(len(task), (BATCH,), generator=generator).tolist()
        loss = task.loss(runner, task.batch(samples, generator))
        # Backward takes twice as long as forward. It is not measured, because DDP waits for its messages there.
        time.sleep((slow - 1) * 3 * (time.perf_counter() - began))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)

    return module, optimizer, gradient


if __name__ == "__main__":
    main()
