"""What half precision on the wire does to training: digits, four learners over real sockets, AD-PSGD on the random ring.

    python benchmarks/half_precision.py [--seeds 8] [--epochs 30]

Prints the mean model's cross-entropy and errors on held-out digits and the spread of the replicas, with weights in half and in
full precision on the wire. Learners are processes, so no two runs are the same: the standard deviation over seeds is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from roundelay import ADPSGD, Learner, init, random_ring
from roundelay.bench.local import local_learners

LEARNERS, HELD_OUT, BATCH, LR = 4, 500, 32, 0.1


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def train(seed: int, epochs: int, *, full_precision: bool) -> dict[str, float]:
    """One learner's part of a run; the figures of the mean model."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    world = init()
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    mine = torch.arange(HELD_OUT + world.rank, len(y), world.size)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    strategy = ADPSGD(random_ring(world.size, seed), full_precision=full_precision)
    torch.manual_seed(1000 * seed + world.rank)
    with Learner(module, optimizer, strategy, world.transport(share_memory=False)) as learner:
        for _ in range(epochs):
            for batch in mine[torch.randperm(len(mine))].split(BATCH):
                nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        learner.finish()
        own = torch.cat([p.detach().flatten() for p in module.parameters()])
        with learner.consensus() as mean_model, torch.no_grad():
            mean = torch.cat([p.detach().flatten() for p in mean_model.parameters()])
            logits = mean_model(x[:HELD_OUT])
        figures = {
            "cross-entropy": float(nn.functional.cross_entropy(logits, y[:HELD_OUT])),
            "errors %": 100 * float((logits.argmax(1) != y[:HELD_OUT]).float().mean()),
            "spread / weights": float((own - mean).norm() / mean.norm()),
        }
    dist.destroy_process_group()
    return figures


def main() -> None:
    """Without --seed start the learners of every run in turn; with it, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        print(json.dumps(train(arguments.seed, arguments.epochs, full_precision=arguments.full)), flush=True)
        return
    rows: dict[str, list[dict[str, float]]] = {"half": [], "full": []}
    for seed in range(arguments.seeds):
        for precision, measured in rows.items():
            options = ["--seed", str(seed), "--epochs", str(arguments.epochs)]
            options += ["--full"] if precision == "full" else []
            with local_learners(LEARNERS, [__file__, *options]) as processes:
                measured.append(json.loads(processes[0].stdout.readline()))  # type: ignore[union-attr]
                for process in processes:
                    process.wait()
    for precision, measured in rows.items():
        for name in measured[0]:
            values = [row[name] for row in measured]
            print(f"{precision}  {name:18} {statistics.mean(values):.3g}  (s.d. {statistics.stdev(values):.2g})")


if __name__ == "__main__":
    main()
