"""An elastic loop whose learners write down which samples they use, and compare the consensus with their own weights.

Files in the folder argv[1]: while there is no `hurry`, steps are slow. Every file `consensus-K` makes all learners compute
the consensus once more.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import roundelay

FOLDER, EPOCHS, SEED = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
SAMPLES, PATIENCE_S = 512, 60.0

generator = torch.Generator().manual_seed(0)  # all learners have the same data
x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
y = x @ torch.randn(8, generator=generator, dtype=torch.float64) + torch.randn(SAMPLES, generator=generator).double()
data = TensorDataset(x, y, torch.arange(SAMPLES))


def loss_of(module, inputs, targets):
    return (module(inputs).squeeze(1) - targets).square().mean()


def compare(learner, number):
    """Write the consensus and this learner's weights; leave it when all have, because afterwards weights change again."""
    with learner.consensus() as mean_model:
        rank, members = learner.transport.rank, learner.members
        mean = nn.utils.parameters_to_vector(mean_model.parameters()).tolist()
        own = learner.strategy.weights().parts[0].tolist()
        written = FOLDER / f"compared-{number}-{rank}.json"
        written.with_suffix(".part").write_text(json.dumps({"members": members, "mean": mean, "own": own}))
        written.with_suffix(".part").rename(written)
        deadline = time.monotonic() + PATIENCE_S
        while not all((FOLDER / f"compared-{number}-{each}.json").exists() for each in members):
            assert time.monotonic() < deadline
            time.sleep(0.01)


model = nn.Linear(8, 1, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
sampler = roundelay.ElasticSampler(SAMPLES, batch_size=16, epochs=EPOCHS, seed=SEED)
used = os.open(FOLDER / f"used-{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

with roundelay.Learner(model, optimizer, roundelay.ADPSGD()) as learner:
    compared = len(list(FOLDER.glob("consensus-*")))
    print(f"process {os.getpid()} is learner {learner.transport.rank}{', which joined' if learner.joined else ''}")
    for _ in sampler.remaining_epochs():
        for inputs, targets, indices in DataLoader(data, batch_sampler=sampler):
            loss_of(model, inputs, targets).backward()
            os.write(used, f"begin {indices.tolist()}\n".encode())
            optimizer.step()
            os.write(used, b"end\n")
            optimizer.zero_grad()
            if not (FOLDER / "hurry").exists():
                time.sleep(0.05)
            if (FOLDER / f"consensus-{compared}").exists():
                compare(learner, compared)
                compared += 1
    learner.finish()
    with learner.consensus() as mean_model:
        print(f"mean model: loss {loss_of(mean_model, x, y).item():.6f}")
