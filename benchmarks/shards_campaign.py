"""Faults in a run with shards: two nodes of two processes (FSDP2), ADPSGD between the nodes; processes are frozen at random.

    python benchmarks/shards_campaign.py --faults 60 --every 5 --out benchmarks/results/shards-campaign.json

The members of a run with shards are fixed, so no process is killed: one after the other is frozen for 2 s. The same run without
faults goes on beside it. Steps sleep 0.15 s, so that the machine has cores left. The seconds lost by a fault are the longest
pause of the processes of the other node near it, minus their usual pause; the frozen process's own node waits for it.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROCESSES, SHARDS, STEP_S, FREEZE_S, NEAR_S = 4, 2, 0.15, 2.0, 10.0


def learn(folder: Path, steps: int) -> None:
    """One process."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import roundelay

    torch.set_num_threads(1)
    world = roundelay.init()
    mesh = init_device_mesh("cpu", (world.size // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    draw = torch.Generator().manual_seed(world.rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 129), nn.ReLU(), nn.Linear(129, 10))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    optimizer, times = torch.optim.AdamW(model.parameters(), lr=1e-3), list[float]()
    with roundelay.Learner(model, optimizer, roundelay.ADPSGD()) as learner:
        (folder / f"{world.rank}.pid").write_text(str(os.getpid()))
        for _ in range(steps):
            batch = torch.randint(1500, (16,), generator=draw)
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_S)
            times.append(time.time())
        learner.finish()
        with learner.consensus() as mean_model, torch.no_grad():
            loss = nn.functional.cross_entropy(mean_model(images[1500:]), labels[1500:]).item()
    result = {"steps": learner.steps, "loss": loss, "times": times}
    (folder / f"{world.rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def started(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start all processes of a run."""
    words = ["torchrun", "--standalone", "--nproc-per-node", str(PROCESSES), __file__]
    return subprocess.Popen([*words, "--folder", str(folder), "--steps", str(steps)])


def freeze_at_random(run: subprocess.Popen[bytes], folder: Path, count: int, every_s: float) -> list[tuple[float, int]]:
    """Freeze `count` processes, one after the other; returns when, and which."""
    faults, draw = list[tuple[float, int]](), random.Random(0)
    while run.poll() is None and len(list(folder.glob("*.pid"))) < PROCESSES:
        time.sleep(0.2)
    while len(faults) < count:
        time.sleep(every_s - FREEZE_S)
        rank = draw.randrange(PROCESSES)
        if run.poll() is not None or (folder / f"{rank}.json").exists():
            break
        pid = int((folder / f"{rank}.pid").read_text())
        faults.append((time.time(), rank))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(FREEZE_S)
        os.kill(pid, signal.SIGCONT)
    return faults


def lost_s(fault: tuple[float, int], faults: list[tuple[float, int]], results: dict[int, Any]) -> float:
    """The longest pause of a process of the other node near the fault, minus its usual pause, without its own faults."""
    at_s, rank = fault
    longest = 0.0
    for other, result in results.items():
        if other // SHARDS != rank // SHARDS:
            own = [each for each, harmed in faults if harmed // SHARDS == other // SHARDS]
            gaps = list(itertools.pairwise(result["times"]))
            usual = statistics.median(after - before for before, after in gaps)
            for before, after in gaps:
                near = after > at_s and before < at_s + NEAR_S
                if near and not any(before - FREEZE_S < each < after for each in own):
                    longest = max(longest, after - before - usual)
    return longest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        learn(options.folder, options.steps)
        return 0
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / name for name in ("disturbed", "undisturbed")]
        for each in folders:
            each.mkdir()
        runs = [started(each, options.steps) for each in folders]
        faults = freeze_at_random(runs[0], folders[0], options.faults, options.every)
        codes = [run.wait() for run in runs]
        results = [{int(path.stem): json.loads(path.read_text()) for path in each.glob("*.json")} for each in folders]
    pauses = sorted(lost_s(fault, faults, results[0]) for fault in faults)
    summary = {
        "command": "python benchmarks/shards_campaign.py " + " ".join(sys.argv[1:]),
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "planned": options.faults,
        "injected": len(faults),
        "survived": len(faults) if codes[0] == 0 and len(results[0]) == PROCESSES else None,
        "lost_s": {"median": statistics.median(pauses), "p99": pauses[min(int(0.99 * len(pauses)), len(pauses) - 1)]},
        "steps": [[each["steps"] for each in run.values()] for run in results],
        "test_loss": [next((each["loss"] for each in run.values()), None) for run in results],
        "elapsed_s": [
            max(each["times"][-1] - each["times"][0] for each in run.values()) if run else None for run in results
        ],
    }
    print(json.dumps(summary, indent=1))
    if options.out:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    return codes[0]


if __name__ == "__main__":
    sys.exit(main())
