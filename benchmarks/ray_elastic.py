"""One of three workers is killed: seconds that the survivors lose, with Ray's elastic training and with Roundelay on Ray.

    python benchmarks/ray_elastic.py --out benchmarks/results/DATE-ray-elastic.json

Both train the same small model on one host; a step takes 50 ms, emulated by sleeping. A survivor loses its
longest pause between two new steps after the kill, without one step's time. Ray Train runs DDP with
`num_workers=(1, 3)` and saves a checkpoint every 20 steps. It starts all workers again from the newest checkpoint, so
steps that are repeated are lost, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

import roundelay
from roundelay.errors import check_installed
from roundelay.training.run_directory import machine

WORKERS, STEP_S, SAVE_EVERY, KILL_AFTER = 3, 0.05, 20, 55
PATIENCE_S = 240.0


def write_step(folder: Path, worker: int, step: int) -> None:
    """Append a step; every line is one write."""
    line = json.dumps({"worker": worker, "pid": os.getpid(), "step": step, "time": time.time()}) + "\n"
    file = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


def model() -> tuple[nn.Module, torch.Tensor]:
    """A small model, and its inputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(32, 64)


def with_roundelay(config: dict[str, str]) -> None:
    """One learner of `roundelay.integrations.ray.run`."""
    folder = Path(config["folder"])
    module, inputs = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with roundelay.Learner(module, optimizer, roundelay.ADPSGD()) as learner:
        while not (folder / "stop").exists():
            module(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_S)
            write_step(folder, learner.transport.rank, learner.steps)


def with_ray_train(config: dict[str, str]) -> None:
    """One worker of Ray's TorchTrainer."""
    import ray.train
    from ray.train.torch import prepare_model

    folder = Path(config["folder"])
    module, inputs = model()
    first = 0
    saved = ray.train.get_checkpoint()
    if saved is not None:
        with saved.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt", weights_only=True)
        module.load_state_dict(state["module"])
        first = state["step"]
    module = prepare_model(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(first + 1, 10**9):
        if (folder / "stop").exists():
            return
        module(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)
        rank = ray.train.get_context().get_world_rank()
        write_step(folder, rank, step)
        if step % SAVE_EVERY == 0:
            with tempfile.TemporaryDirectory() as directory:
                if rank == 0:
                    torch.save({"module": module.module.state_dict(), "step": step}, Path(directory) / "state.pt")
                kept = ray.train.Checkpoint.from_directory(directory) if rank == 0 else None
                ray.train.report({"step": step}, checkpoint=kept)


def train_by_roundelay(folder: Path) -> None:
    """Until there is a file `stop`."""
    from roundelay.integrations.ray import run

    run(with_roundelay, {"folder": str(folder)}, learners=WORKERS)


def train_by_ray(folder: Path) -> None:
    """Until there is a file `stop`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        with_ray_train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=(1, WORKERS), elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    )
    trainer.fit()


def rows(folder: Path) -> list[dict[str, float]]:
    """All steps so far."""
    path = folder / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Killer:
    """Kills worker 1 once all have taken `KILL_AFTER` steps, and stops the run when the others have taken 60 new ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.killed_at, self.steps_then = 0.0, dict[int, int]()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        self._wait(lambda steps: len(steps) == WORKERS and min(steps.values()) >= KILL_AFTER)
        pid = next(int(row["pid"]) for row in reversed(rows(self._folder)) if row["worker"] == 1)
        os.kill(pid, signal.SIGKILL)
        self.killed_at, self.steps_then = time.time(), self._steps()
        self._wait(lambda steps: all(steps[each] >= self.steps_then[each] + 60 for each in (0, 2)))
        (self._folder / "stop").touch()

    def _steps(self) -> dict[int, int]:
        return {int(row["worker"]): int(row["step"]) for row in rows(self._folder)}

    def _wait(self, condition) -> None:  # noqa: ANN001
        deadline = time.time() + PATIENCE_S
        while not condition(self._steps()):
            if time.time() > deadline:
                (self._folder / "stop").touch()
                raise TimeoutError(f"no progress in {PATIENCE_S:g} s: {self._steps()}")
            time.sleep(0.1)

    def lost_s(self) -> list[float]:
        """Seconds that each survivor has lost: its longest pause between two new steps after the kill, without a step's time."""
        self._thread.join()
        lost = []
        for worker in (0, 2):
            newest, times = -1, []
            for row in rows(self._folder):
                if row["worker"] == worker and row["step"] > newest:
                    newest = int(row["step"])
                    times.append(row["time"])
            pauses = [after - before for before, after in itertools.pairwise(times) if after > self.killed_at]
            lost.append(max(pauses) - STEP_S)
        return lost


def main() -> None:
    """Measure both, several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    check_installed("ray", "a benchmark on Ray", "ray")
    import ray

    ray.init(num_cpus=2 * WORKERS, include_dashboard=False, log_to_driver=False)
    found: dict[str, list[float]] = {"roundelay": [], "ray": []}
    for _ in range(args.repetitions):
        for name, train in (("roundelay", train_by_roundelay), ("ray", train_by_ray)):
            with tempfile.TemporaryDirectory() as folder:
                killer = Killer(Path(folder))
                train(Path(folder))
                found[name].append(max(killer.lost_s()))
            print(f"{name}: {found[name][-1]:.2f} s", flush=True)
    medians = {name: statistics.median(lost) for name, lost in found.items()}
    print(f"seconds lost by a survivor, median: {medians}")
    if args.out:
        document = {"command": "python benchmarks/ray_elastic.py", "machine": machine(), "ray": ray.__version__}
        args.out.write_text(json.dumps(document | {"lost_s": found, "median_s": medians}, indent=2) + "\n")


if __name__ == "__main__":
    main()
