"""Run by torchrun: train the quadratics of worlds.py with every strategy; final weights go to DIRECTORY/rank.npz."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import roundelay

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from worlds import LR, MOMENTUM, Quadratic, problem

STEPS = 50
EXCHANGES = 150  # of each learner's own; as many are served


def train_quadratic(world, strategy, *, share_memory=True):
    curvatures, targets = problem(world.size)
    module = Quadratic(torch.tensor(curvatures[world.rank]), torch.tensor(targets[world.rank]))
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
    with roundelay.Learner(module, optimizer, strategy, world.transport(share_memory=share_memory)) as learner:
        for _ in range(STEPS):
            optimizer.zero_grad()
            module().backward()
            optimizer.step()
        own = module.vector()
        with learner.consensus():
            consensus = module.vector()
        assert np.array_equal(own, module.vector()) or not strategy.synchronous
    return module.vector(), consensus


def train_network(world, *, ddp=False):
    """A small network on data that differs by learner: the one thing DDP and Allreduce must agree on."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    batches = torch.Generator().manual_seed(world.rank)
    learner = None
    if not ddp:
        learner = roundelay.Learner(module, optimizer, roundelay.Allreduce(), world.transport())
    runner = DistributedDataParallel(module) if ddp else module
    for _ in range(STEPS):
        runner(torch.randn(8, 20, generator=batches)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)  # sees the mean gradient in both
        optimizer.step()
        optimizer.zero_grad()
    if learner:
        learner.close()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).numpy()


def hammer(world, *, share_memory, lr):
    """Step as fast as possible at random times until EXCHANGES are done; what was there, what was added, and what is there."""
    torch.manual_seed(0)
    module = nn.Linear(200, 200).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    rng = random.Random(world.rank)
    added = torch.zeros_like(module.weight)
    with roundelay.Learner(
        module,
        optimizer,
        roundelay.ADPSGD(roundelay.random_ring(world.size)),
        world.transport(share_memory=share_memory),
    ) as learner:
        start = module.weight.detach().clone()
        if lr == 0:  # one step that makes learners differ, so that there is something to average
            module.weight.grad = torch.full_like(start, -float(world.rank))
            optimizer.param_groups[0]["lr"] = 1.0
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.0
            added += float(world.rank)
        deadline = time.perf_counter() + 60.0
        while learner.metrics()["exchanges_finished"] < EXCHANGES and time.perf_counter() < deadline:
            module.weight.grad = torch.randn_like(module.weight)
            added -= lr * module.weight.grad
            optimizer.step()
            if rng.random() < 0.5:
                time.sleep(0.0005)
        with learner.consensus():
            pass  # everybody has stopped exchanging
        exchanges = learner.metrics()["exchanges_finished"]
    return start.numpy(), added.numpy(), module.weight.detach().numpy().copy(), exchanges


def main():
    torch.set_num_threads(1)
    world = roundelay.init()
    ring, random_ring = roundelay.ring, roundelay.random_ring
    results = {}
    for name, strategy, share_memory in (
        ("dpsgd ring", roundelay.DPSGD(ring(4)), True),
        ("dpsgd random ring", roundelay.DPSGD(random_ring(4)), True),
        ("dpsgd random ring over sockets", roundelay.DPSGD(random_ring(4)), False),
        ("delay-by-one", roundelay.DelayByOne(), True),
        ("delay-by-one gradients", roundelay.DelayByOne("gradients"), True),
        ("allreduce", roundelay.Allreduce(), True),
        ("super-learners", roundelay.SuperLearner(roundelay.DPSGD(ring(2)), 2), True),
        ("super-learners adpsgd", roundelay.SuperLearner(roundelay.ADPSGD(ring(2)), 2), True),
    ):
        results[name], results[f"{name} consensus"] = train_quadratic(world, strategy, share_memory=share_memory)
    results["network ddp"] = train_network(world, ddp=True)
    results["network allreduce"] = train_network(world)
    for name, share_memory, lr in (
        ("steps shared", True, 0.01),
        ("steps sockets", False, 0.01),
        ("still shared", True, 0.0),
        ("still sockets", False, 0.0),
    ):
        parts = hammer(world, share_memory=share_memory, lr=lr)
        results |= {
            f"hammer {name} {part}": value
            for part, value in zip(("start", "added", "end", "exchanges"), parts, strict=False)
        }
    np.savez(Path(sys.argv[1]) / f"{world.rank}.npz", **results)


if __name__ == "__main__":
    main()
