"""Does a long run leak? Four learners train while one of them is killed again and again; their resources are written down.

    python benchmarks/soak.py --hours 2 --out benchmarks/results/soak.json

The learners run under `roundelay launch --restarts -1` with ADPSGD, sleep 50 ms in every step, and meet in a consensus once a
minute. Learner 0 is never killed, so what others leave behind in it can be seen. Once a minute this program notes resident
memory, threads, file descriptors and shared memory of the launcher and of learner 0, and what is used in /dev/shm. At the
end it prints how much each of them has grown per hour, after a warm-up of ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEARNERS, STEP_S, CONSENSUS_S, CONSENSUS_TIMEOUT_S = 4, 0.05, 60.0, 20.0
LEARNER = "ROUNDELAY_LEARNER"  # set by the launcher for every learner
FIGURES = ("resident_kB", "threads", "file_descriptors", "shared_memory_kB")


def learn() -> None:
    """Train until the launcher ends the process. Every learner of the soak runs this."""
    import torch
    from torch import nn

    import roundelay
    from roundelay.errors import MissingLearnersError

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with roundelay.Learner(model, optimizer, roundelay.ADPSGD()) as learner:
        minute = time.time() // CONSENSUS_S
        while True:
            x = torch.randn(16, 32)
            (model(x) - x[:, :8].sin()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_S)
            if time.time() // CONSENSUS_S != minute:
                minute = time.time() // CONSENSUS_S
                with contextlib.suppress(MissingLearnersError), learner.consensus(CONSENSUS_TIMEOUT_S) as mean_model:
                    assert all(torch.isfinite(weight).all() for weight in mean_model.parameters())
                    print(f"{time.time():.0f} consensus of {learner.members} after {learner.steps} steps", flush=True)


def resources(pid: int) -> dict[str, int]:
    """What a process uses. Raises OSError or KeyError if it has ended."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    shared, descriptors = dict[int, int](), list(Path(f"/proc/{pid}/fd").iterdir())
    for each in descriptors:
        with contextlib.suppress(OSError):
            if str(each.readlink()).startswith(("/memfd:", "/dev/shm/")):
                found = each.stat()
                shared[found.st_ino] = found.st_blocks // 2
    return {
        "resident_kB": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "file_descriptors": len(descriptors),
        "shared_memory_kB": sum(shared.values()),
    }


def learners_of(launcher: int) -> dict[int, int]:
    """The processes that the launcher has started, by learner."""
    found: dict[int, int] = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            own = [value for name, _, value in (each.partition(b"=") for each in variables) if name.decode() == LEARNER]
            found |= {int(value): int(child) for value in own}
    return found


def sample(launcher: int) -> dict[str, Any]:
    """The resources of all processes now."""
    used = {"launcher": resources(launcher)}
    for learner, pid in sorted(learners_of(launcher).items()):
        with contextlib.suppress(OSError, KeyError):
            used[f"learner {learner}"] = resources(pid)
    return used | {"dev_shm_kB": shutil.disk_usage("/dev/shm").used // 1024}


def watched(launcher: subprocess.Popen[bytes], seconds: float, kill_every_s: float) -> Iterator[dict[str, Any]]:
    """A sample every minute, while a learner other than learner 0 is killed every `kill_every_s` seconds."""
    draw, began, kills = random.Random(0), time.monotonic(), 0
    next_sample, next_kill = 60.0, kill_every_s
    while launcher.poll() is None and (elapsed := time.monotonic() - began) < seconds:
        if elapsed >= next_kill:
            victims = {learner: pid for learner, pid in learners_of(launcher.pid).items() if learner}
            if victims:
                os.kill(draw.choice(sorted(victims.values())), signal.SIGKILL)
                kills += 1
            next_kill += kill_every_s
        if elapsed >= next_sample:
            yield {"minutes": round(elapsed / 60, 2), "kills": kills, **sample(launcher.pid)}
            next_sample += 60.0
        time.sleep(1.0)


def per_hour(samples: list[dict[str, Any]], value: Any, warm_up_min: float) -> float:  # noqa: ANN401
    """The slope of a least-squares line through the values after the warm-up, per hour."""
    points = [(each["minutes"] / 60, value(each)) for each in samples if each["minutes"] >= warm_up_min]
    mean_x, mean_y = (sum(each) / len(points) for each in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def slopes(samples: list[dict[str, Any]], warm_up_min: float) -> dict[str, dict[str, float]]:
    """Growth per hour, and the first and last value after the warm-up."""
    kept = [each for each in samples if each["minutes"] >= warm_up_min]
    figures: dict[str, Any] = {
        f"{process} {figure}": lambda each, process=process, figure=figure: each[process][figure]
        for process in ("launcher", "learner 0")
        for figure in FIGURES
    } | {"dev_shm_kB (of the whole machine)": lambda each: each["dev_shm_kB"]}
    return {
        name: {
            "per_hour": round(per_hour(samples, value, warm_up_min), 2),
            "first": value(kept[0]),
            "last": value(kept[-1]),
        }
        for name, value in figures.items()
    }


def main() -> int:
    if LEARNER in os.environ:
        learn()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--kill-every", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--warm-up", type=float, default=10.0, metavar="MINUTES")
    parser.add_argument("--logs", type=Path, default=Path("out/soak"), metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all samples here, again every minute")
    options = parser.parse_args()
    command = [sys.executable, "-m", "roundelay", "launch", "--learners", str(LEARNERS), "--restarts", "-1"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result: dict[str, Any] = {
        "command": "python benchmarks/soak.py " + " ".join(sys.argv[1:]),
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), shared with other jobs",
        "samples": [],
    }
    launcher = subprocess.Popen([*command, "--logs", str(options.logs), __file__])
    try:
        for each in watched(launcher, options.hours * 3600, options.kill_every):
            result["samples"].append(each)
            if sum(each["minutes"] >= options.warm_up for each in result["samples"]) > 1:
                result["slopes"] = slopes(result["samples"], options.warm_up)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
        lived = launcher.poll() is None
    finally:
        launcher.send_signal(signal.SIGINT)
        time.sleep(2.0)
        launcher.send_signal(signal.SIGINT)
        launcher.wait()
    last = result["samples"][-1]
    print(
        f"{last['minutes']:g} minutes, {last['kills']} learners killed; growth per hour after {options.warm_up:g} minutes:"
    )
    for name, figure in result["slopes"].items():
        print(f"  {name:34} {figure['per_hour']:+10.2f}   ({figure['first']} to {figure['last']})")
    return 0 if lived else 1


if __name__ == "__main__":
    sys.exit(main())
