"""Run by one torchrun per machine: ADPSGD until a file is there. Usage: machines.py STOP_FILE OUTPUT_FOLDER."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import roundelay

stop, folder = Path(sys.argv[1]), Path(sys.argv[2])
logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.set_num_threads(1)
world = roundelay.init()
torch.manual_seed(world.rank)
module = nn.Linear(3, 2, dtype=torch.float64)
optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
status = folder / f"learner-{world.rank}.json"


def write(**figures: object) -> None:
    (partial := status.with_suffix(".partial")).write_text(json.dumps(figures))
    partial.replace(status)


with roundelay.Learner(module, optimizer, roundelay.ADPSGD(), world=world) as learner:
    while not stop.exists():
        (module(torch.randn(8, 3, dtype=torch.float64)) - world.rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        write(steps=learner.steps, members=learner.members, metrics=learner.metrics())
    learner.finish()
    own = learner.strategy.weights().parts[0].tolist()
    with learner.consensus() as mean:
        mean_weights = nn.utils.parameters_to_vector(mean.parameters()).detach().tolist()
write(
    finished=learner.steps,
    own=own,
    mean=mean_weights,
    local=[world.local_rank, world.local_size, int(os.environ["LOCAL_RANK"])],
)
