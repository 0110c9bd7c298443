"""Where the CPU time of a step goes: milliseconds per step and learner, by kind of thread, and how long the GIL is held.

    python benchmarks/thread_times.py --seconds 4 --repetitions 3
    python benchmarks/thread_times.py --seconds 8 --py-spy      # needs py-spy, and the right to trace processes

Four learners with 20 ms of emulated compute a step, as in `roundelay bench throughput`; cases are interleaved, medians are shown.
CPU time is far less sensitive than throughput to whatever else the machine is doing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict

CASES = {"none": None, "adpsgd, shared memory": "shared-memory", "adpsgd, sockets": "sockets"}
KINDS = {"MainThread": "training", "roundelay-call": "calling", "roundelay-lane": "serving"}  # by how the name begins
LEARNERS, WARM_UP_STEPS, SAMPLES_PER_S = 4, 10, 250


def cpu_by_kind() -> dict[str, float]:
    """CPU seconds so far of every kind of thread in this process."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        kind = next((kind for name, kind in KINDS.items() if thread.name.startswith(name)), "other")
        seconds[kind] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    seconds["all"] = time.process_time()
    return seconds


def learner(transport: str | None, arguments: argparse.Namespace) -> dict[str, float]:
    """Train for some seconds as one of the learners; milliseconds per step by kind of thread, and what else was counted."""
    import torch
    import torch.distributed as dist

    from roundelay import ADPSGD, Learner, init, random_ring
    from roundelay.bench.models import build

    torch.set_num_threads(1)
    world = init()
    module, batch = build("emulated", arguments.parameters, arguments.step_s, 1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    mine = None
    if transport:
        strategy = ADPSGD(random_ring(world.size))
        mine = Learner(module, optimizer, strategy, world.transport(share_memory=transport == "shared-memory"))

    def step() -> None:
        module(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    dist.barrier()
    sampler = _sampler(arguments) if arguments.py_spy and world.rank == 0 else None
    before, began, steps = cpu_by_kind(), time.perf_counter(), 0
    while time.perf_counter() - began < arguments.seconds:
        step()
        steps += 1
    elapsed, after = time.perf_counter() - began, cpu_by_kind()
    dist.barrier()
    figures = {kind: 1e3 * (after[kind] - before.get(kind, 0.0)) / steps for kind in after}
    figures["wall"] = 1e3 * elapsed / steps
    if mine:
        figures["exchanges"] = mine.metrics()["exchanges_per_step"]
        mine.close()
    if sampler:
        figures["GIL %"] = _share(sampler)
    dist.destroy_process_group()
    return figures


def _sampler(arguments: argparse.Namespace) -> subprocess.Popen[str]:
    """py-spy on this process, counting the moments in which some thread holds the GIL."""
    seconds = max(1, int(arguments.seconds) - 1)
    command = ["py-spy", "record", "--gil", "--nonblocking", "--format", "raw", "--output", "/dev/stdout"]
    command += ["--rate", str(SAMPLES_PER_S), "--duration", str(seconds), "--pid", str(os.getpid())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _share(sampler: subprocess.Popen[str]) -> float:
    held = sum(int(line.rsplit(" ", 1)[1]) for line in sampler.communicate()[0].splitlines() if ";" in line)
    duration = int(sampler.args[sampler.args.index("--duration") + 1])  # type: ignore[union-attr,index,arg-type]
    return 100 * held / (SAMPLES_PER_S * duration)


def measure(case: str) -> dict[str, float]:
    """Run the learners of one case; the mean of each figure over those that have it."""
    from roundelay.bench.local import local_learners

    with local_learners(LEARNERS, [__file__, *sys.argv[1:], "--case", case]) as processes:
        lines = [process.stdout.readline() for process in processes if process.stdout]
    rows: list[dict[str, float]] = [json.loads(line) for line in lines]
    return {name: statistics.mean(row[name] for row in rows if name in row) for row in rows for name in row}


def main() -> None:
    """Without --case start the learners of every case in turn; with it, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=1_000_000)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--py-spy", action="store_true", help="also how long the GIL is held in learner 0")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(learner(CASES[arguments.case], arguments)), flush=True)
        return
    measured: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(arguments.repetitions):
        for case, rows in measured.items():
            rows.append(measure(case))
    for case, rows in measured.items():
        names = list(dict.fromkeys(name for row in rows for name in row))
        medians = {name: statistics.median(row[name] for row in rows if name in row) for name in names}
        print(f"{case:24}", *(f"{name} {value:.2f}" for name, value in sorted(medians.items())), sep="  ")


if __name__ == "__main__":
    main()
