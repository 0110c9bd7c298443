"""One learner process of the throughput benchmark. Its argument is JSON: the cases, and the seconds for each.

All learners measure the cases in order. Learner 0 prints one line per case: a JSON list with the measurement of each learner.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
import torch.distributed as dist

from roundelay.bench.cases import Case, Measurement, measure
from roundelay.cluster import environment

FIELDS = [field.name for field in dataclasses.fields(Measurement)]


def main() -> None:
    """Measure all cases of the command line."""
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    world = environment.init()
    for entry in plan["cases"]:
        own = measure(Case(**entry), world, plan["seconds"])
        gathered = [torch.zeros(len(FIELDS), dtype=torch.float64) for _ in range(world.size)]
        dist.all_gather(gathered, torch.tensor(dataclasses.astuple(own), dtype=torch.float64))
        if world.rank == 0:
            rows = [dict(zip(FIELDS, values.tolist(), strict=True)) for values in gathered]
            sys.stdout.write(json.dumps(rows) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
