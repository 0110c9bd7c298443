"""Run with 2 x 2 processes: ADPSGD in shards; processes of one node die. Usage: dying_node.py NODE FIRST_DEAD_SHARD."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import roundelay

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from sharded import NODES, SHARDS, batch, loss, model

STEPS, FAULT_AT = 120, 30


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (NODES, SHARDS), mesh_dim_names=("replicate", "shard"))
    node, shard = (mesh.get_local_rank(name) for name in ("replicate", "shard"))
    module = fully_shard(model(), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with roundelay.Learner(module, optimizer, roundelay.ADPSGD()) as learner:
        for step in range(STEPS):
            loss(module, batch(node, step).chunk(SHARDS)[shard]).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            if (node, step) == (int(sys.argv[1]), FAULT_AT) and shard >= int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
        learner.finish()
        whole = learner.mean_state_dict()
    print(f"finished {learner.steps} {len(whole)}", flush=True)


if __name__ == "__main__":
    main()
