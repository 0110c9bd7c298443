"""Folders such as `roundelay train` leaves them, with figures from formulas instead of training."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundelay.training.config_table import to_toml

Row = dict[str, Any]


@dataclass
class SyntheticRun:
    """A run of `seconds`, in which learner i needs `step_s` times its slowness for a step of 32 samples."""

    strategy: str = "adpsgd"
    learners: int = 4
    slow: dict[int, float] = field(default_factory=dict)
    seconds: int = 40
    step_s: float = 0.02
    dies: dict[int, float] = field(default_factory=dict)
    finished: bool = True
    simulated: bool = False
    seed: int = 0
    figure: str = "accuracy"

    def write(self, folder: Path) -> Path:
        """Leave config.toml, machine.json, metrics.jsonl and, if finished, results.json."""
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(to_toml(self.config()))
        simulated = {"simulated": True} if self.simulated else {}
        (folder / "machine.json").write_text(json.dumps(MACHINE | simulated))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows()))
        if self.finished:
            (folder / "results.json").write_text(json.dumps(self.results()))
        return folder

    def config(self) -> Row:
        """As a run resolves it."""
        return {
            "task": "roundelay.training.tiny:Digits",
            "learners": self.learners,
            "strategy": self.strategy,
            "topology": "random-ring",
            "group_size": 1,
            "max_lead": 16,
            "seed": self.seed,
            "slow": ",".join(f"{learner}:{factor:g}" for learner, factor in self.slow.items()),
            "settings": {"hidden": 64},
            "data": {"batch": 32, "sharding": "dynamic" if self.slow else "static"},
            "budget": {"epochs": 10.0},
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": False},
        }

    def rows(self) -> list[Row]:
        """In the order of time."""
        rng = random.Random(self.seed)
        rows = [self._evaluation(second) for second in range(0, self.seconds + 1, 4)]
        for second in range(1, self.seconds + 1):
            living = [rank for rank in range(self.learners) if second <= self.dies.get(rank, math.inf)]
            rows += [self._learner(rank, second, rng) for rank in living]
        rows += [
            {"kind": "event", "event": "lost", "learner": rank, "elapsed_s": second, "reason": "no heartbeat for 5 s"}
            for rank, second in self.dies.items()
        ]
        return sorted(rows, key=lambda row: row["elapsed_s"])

    def results(self) -> Row:
        """The last evaluation, and a test."""
        valid = self.figures(self.seconds)
        test = {"loss": 1.1 * valid["loss"], self.figure: 0.98 * valid[self.figure]}
        samples_seen = self.samples_seen(self.seconds)
        return {
            "finished": True,
            "elapsed_s": float(self.seconds),
            "samples": samples_seen,
            "learners": self.learners,
        } | {
            "valid": valid,
            "test": test,
        }

    def figures(self, second: float) -> dict[str, float]:
        """What an evaluation finds: the loss falls with the samples used."""
        loss = 0.08 + 2.2 * math.exp(-self.samples_seen(second) / 20_000)
        return {"loss": loss, self.figure: 1 - loss / 2.5}

    def paces(self) -> list[float]:
        """Seconds a step of every learner: asynchronous ones have their own, others that of the slowest."""
        own = [self.step_s * self.slow.get(rank, 1.0) for rank in range(self.learners)]
        return own if self.strategy == "adpsgd" else [max(own) * 1.1] * self.learners

    def samples_seen(self, second: float) -> int:
        """Samples of all learners by then."""
        return int(sum(32 * second / pace for pace in self.paces()))

    def _evaluation(self, second: int) -> Row:
        row: Row = {
            "kind": "evaluation",
            "split": "valid",
            "elapsed_s": float(second),
            "samples_seen": self.samples_seen(second),
        }
        return row | {"samples": 360} | self.figures(second)

    def _learner(self, rank: int, second: int, rng: random.Random) -> Row:
        pace = self.paces()[rank]
        own = self.step_s * self.slow.get(rank, 1.0)
        steps = int(second / pace)
        row: Row = {
            "kind": "learner",
            "learner": rank,
            "elapsed_s": second + 0.01 * rng.random(),
            "samples_seen": self.samples_seen(second),
            "samples": 32 * steps,
            "loss": self.figures(second)["loss"] * rng.uniform(0.85, 1.15),
            "lr": 0.1 * 0.5 ** (second / self.seconds),
            "samples_per_s": 32 / pace * rng.uniform(0.93, 1.04),
            "skipped": 0,
            "steps": steps,
            "compute_s": own * 0.93,
            "mix_s": own * 0.04,
            "wait_s": pace - 0.97 * own,
        }
        if self.strategy in ("adpsgd", "dpsgd"):
            row["spread"] = 0.4 * math.exp(-second / 30) * rng.uniform(0.8, 1.2)
        if self.strategy == "adpsgd":
            row |= {"exchanges_per_step": 0.97, "staleness_mean": 1.0 + 0.5 * rng.random(), "lead": rng.randrange(3)}
            for peer in range(self.learners):
                if peer != rank:
                    row[f"exchanges_with_{peer}"] = int(steps / self.learners * rng.uniform(0.9, 1.1))
        return row


MACHINE: Row = {
    "hostname": "node-1",
    "cpu": "Example CPU at 2.5 GHz",
    "cores": 2,
    "memory_gib": 7.8,
    "python": "3.11.7",
    "torch": "2.13.0",
    "roundelay": "0.1.0",
    "commit": "abc1234",
    "command": "roundelay train tiny --learners 4 --out out/run",
    "started": "2026-11-20T10:00:00+00:00",
}
