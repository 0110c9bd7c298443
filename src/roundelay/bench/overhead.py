"""What metrics and checkpoints cost a run: the same run with and without them, interleaved."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from roundelay.bench.models import EmulatedModel
from roundelay.errors import RoundelayError
from roundelay.training.config import at_least
from roundelay.training.task import Task, TaskConfig

STEP_S = 0.02
NEVER = "1e9"
CASES = {
    "neither": {"metrics.every_s": NEVER, "checkpoint.every_epochs": NEVER},
    "metrics": {"metrics.every_s": "1", "checkpoint.every_epochs": NEVER},
    "metrics and checkpoints": {"metrics.every_s": "1", "checkpoint.every_epochs": "0.5"},
}


@dataclass(frozen=True)
class EmulatedConfig(TaskConfig):
    """Attributes: parameters, of the model; steps, in an epoch."""

    parameters: int = at_least(1000, 1_000_000)
    steps: int = at_least(1, 1000)


class Emulated(Task):
    """Steps of emulated accelerator time; nothing is learned."""

    Config = EmulatedConfig
    config: EmulatedConfig

    def __len__(self) -> int:
        return self.config.steps

    def module(self) -> nn.Module:
        """Sleeps as an accelerator would."""
        return EmulatedModel(self.config.parameters, STEP_S)

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> Tensor:
        """One number."""
        return torch.ones(1, requires_grad=True)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        """That number."""
        loss: Tensor = module(batch).sum()
        return loss

    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """Nothing to evaluate."""
        return {"samples": 1.0, "loss": 0.0}


@dataclass(frozen=True)
class Row:
    """A case; overhead is the median over repetitions of the time a step takes more than with neither, as a fraction."""

    case: str
    steps_per_s: float
    overhead: float
    overhead_range: tuple[float, float]


def run(*, learners: int, seconds: float, repetitions: int, progress: Callable[[str], None]) -> list[Row]:
    """Measure every case `repetitions` times, interleaved."""
    speeds: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(repetitions):
        for case, settings in CASES.items():
            speeds[case].append(_steps_per_s(learners, max(1, int(seconds / STEP_S) * learners), settings))
            progress(case)
    rows = []
    for case, measured in speeds.items():
        overheads = [plain / speed - 1 for plain, speed in zip(speeds["neither"], measured, strict=True)]
        spread = (min(overheads), max(overheads))
        rows.append(Row(case, statistics.median(measured), statistics.median(overheads), spread))
    return rows


def _steps_per_s(learners: int, steps: int, settings: dict[str, str]) -> float:
    chosen = {"learners": learners, "data.batch": 1, "budget.epochs": 1, "settings.steps": steps} | settings
    words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "roundelay", "train", f"{__name__}:Emulated", "--out", str(out), *words]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RoundelayError(f"the run that was to be measured failed: {ended.stderr.strip()}")
        results = json.loads((out / "results.json").read_text())
    return float(results["samples"] / results["elapsed_s"])
