"""An elastic loop: learners may die, come back and join while the others train.

    roundelay launch --learners 4 --restarts -1 examples/05_elastic_loop.py --epochs 20 --pause 0.05

Kill any learner (kill -9): the others go on, it is started again, and it takes their weights before its first step. The same
file runs under torchrun, Slurm and Ray, or alone.
"""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import roundelay

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=4)
options.add_argument(
    "--pause", type=float, default=0.0, help="seconds to sleep in each step, as if the model were larger"
)
options.add_argument("--strategy", default="ADPSGD", choices=["ADPSGD", "DPSGD", "Allreduce", "DelayByOne"])
args = options.parse_args()

torch.manual_seed(0)  # all learners have the same data
x = torch.randn(4096, 20)
y = (x[:, :10].sum(1) > x[:, 10:].sum(1)).long()

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
sampler = roundelay.ElasticSampler(len(x), batch_size=32, epochs=args.epochs)
loader = DataLoader(TensorDataset(x, y), batch_sampler=sampler)

with roundelay.Learner(model, optimizer, getattr(roundelay, args.strategy)()) as learner:
    print(f"process {os.getpid()} is learner {learner.transport.rank}{', which joined' if learner.joined else ''}")
    for epoch in sampler.remaining_epochs():
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(args.pause)
        print(f"epoch {epoch}: loss {loss.item():.3f} after {learner.steps} steps, learners {learner.members}")
    learner.finish()
    with learner.consensus() as mean_model:
        accuracy = (mean_model(x).argmax(1) == y).float().mean().item()
    print(f"mean model: accuracy {accuracy:.3f}")
