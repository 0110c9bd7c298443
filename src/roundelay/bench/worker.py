"""One learner process of a benchmark: reads the cases, measures each in turn, and learner 0 prints a line a case."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from roundelay.bench.cases import Case, measure
from roundelay.cluster import environment as launch


def main() -> None:
    """Cases come as JSON on the command line; results go to stdout as JSON lines."""
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    world = launch.init()
    for entry in plan["cases"]:
        mine = measure(Case(**entry), world, plan["seconds"])
        gathered = [torch.zeros(3, dtype=torch.float64) for _ in range(world.size)]
        dist.all_gather(
            gathered, torch.tensor([mine["steps"], mine["seconds"], mine["exchanges"]], dtype=torch.float64)
        )
        if world.rank == 0:
            sys.stdout.write(json.dumps([row.tolist() for row in gathered]) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
