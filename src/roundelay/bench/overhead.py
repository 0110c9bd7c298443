"""What metrics and checkpoints cost: the steps of a run in which they happen, against the other steps of the same run.

A run with them and a run without them cannot be compared: on a machine that other programs use, runs differ by 5 %.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor, nn

from roundelay.bench.models import EmulatedModel
from roundelay.cluster.elastic_world import LEARNER
from roundelay.errors import RoundelayError
from roundelay.training import run_directory
from roundelay.training.config import at_least
from roundelay.training.metrics import read_rows
from roundelay.training.task import Task, TaskConfig

STEP_S = 0.02
AROUND_S = 0.5  # seconds before the first and after the last file of a checkpoint that count as saving
FEWEST_CHECKPOINTS = 3
RESAMPLES = 1000


@dataclass(frozen=True)
class EmulatedConfig(TaskConfig):
    """Settings of `Emulated`.

    Attributes:
        parameters: number of parameters of the model.
        steps: samples in an epoch. With a batch of 1, these are the steps of all learners together.
        trace: the folder for files with the start time of every step; empty: no files.
    """

    parameters: int = at_least(1000, 1_000_000)
    steps: int = at_least(1, 1000)
    trace: str = ""


class Emulated(Task):
    """Steps that sleep for as long as an accelerator would compute. Nothing is learned."""

    Config = EmulatedConfig
    config: EmulatedConfig

    def __init__(self, config: EmulatedConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._step = 0
        self._times: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return self.config.steps

    def module(self) -> nn.Module:
        """A model that sleeps instead of computing."""
        return EmulatedModel(self.config.parameters, STEP_S)

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> Tensor:
        """A single number."""
        return torch.ones(1, requires_grad=True)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        """The sum of the output. Writes the time of the call to the trace, a memory-mapped file."""
        if self._times is None and self.config.trace:
            name = Path(self.config.trace) / f"{os.environ[LEARNER]}.npy"
            self._times = open_memmap(name, mode="w+", dtype=np.float64, shape=(self.config.steps + 1,))
        if self._times is not None:
            self._times[self._step] = time.time()
            self._step += 1
        loss: Tensor = module(batch).sum()
        return loss

    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """Figures of the right form; there is nothing to evaluate."""
        return {"samples": 1.0, "loss": 0.0}


@dataclass(frozen=True)
class Trace:
    """What is known about the steps of one learner.

    Attributes:
        times_s: when each step began.
        rows: the numbers of steps after which the learner wrote a row of metrics.
        savings: beginning and end of every checkpoint, of any learner.
    """

    times_s: NDArray[np.float64]
    rows: frozenset[int]
    savings: Sequence[tuple[float, float]]

    def gaps(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], NDArray[np.intp]]:
        """For each step: its seconds; whether a row was written; whether a checkpoint was being saved; checkpoints so far."""
        begin, end = self.times_s[:-1], self.times_s[1:]
        wrote = np.isin(np.arange(1, len(self.times_s)), list(self.rows))
        saving = np.zeros(len(begin), dtype=bool)
        for first, last in self.savings:
            saving |= (end > first) & (begin < last)
        period = np.searchsorted([first for first, _ in self.savings], begin, side="right")
        return end - begin, wrote, saving, period


@dataclass(frozen=True)
class Row:
    """One case. `overhead` is the extra time of its steps, as a fraction of steps without metrics and checkpoints."""

    case: str
    steps_per_s: float
    overhead: float
    ci95: tuple[float, float]


def costs(traces: Sequence[Trace]) -> list[Row]:
    r"""Mean time of a step over the mean time of a calm step: $\overline{t} / \overline{t}_{calm} - 1$.

    A calm step is one without metrics and checkpoints. The interval is a bootstrap over the periods between checkpoints.
    Raises RoundelayError if the run had too few checkpoints.
    """
    seconds, wrote, saving, period = (np.concatenate(each) for each in zip(*(t.gaps() for t in traces), strict=True))
    if len(traces[0].savings) < FEWEST_CHECKPOINTS:
        raise RoundelayError(
            f"the run had {len(traces[0].savings)} checkpoints, and {FEWEST_CHECKPOINTS} are needed to tell their cost; "
            "use a longer run: --seconds"
        )
    calm = ~wrote & ~saving
    speed = sum((len(trace.times_s) - 1) / (trace.times_s[-1] - trace.times_s[0]) for trace in traces)
    rows = []
    for case, counted in {"metrics": ~saving, "metrics and checkpoints": np.ones_like(calm)}.items():
        sums = _sums_by_period(seconds, period, counted, calm)
        drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
        low, high = np.quantile(_overhead(sums[drawn].sum(1)), (0.025, 0.975))
        rows.append(Row(case, float(speed), float(_overhead(sums.sum(0))), (float(low), float(high))))
    return rows


def _sums_by_period(
    seconds: NDArray[np.float64], period: NDArray[np.intp], *groups: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """For each period: the seconds and the number of the steps of every group."""
    columns = [column for group in groups for column in (seconds * group, group)]
    return np.stack([np.bincount(period, weights=column) for column in columns], axis=1)


def _overhead(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    counted_s, counted, calm_s, calm = np.moveaxis(sums, -1, 0)
    result: NDArray[np.float64] = (counted_s / counted) / (calm_s / calm) - 1
    return result


def measure(*, learners: int, seconds: float, checkpoint_every_s: float = 4.0) -> list[Row]:
    """Measure a run of adpsgd with one row of metrics per second and learner, and a checkpoint every few seconds."""
    steps = max(1, int(seconds / STEP_S)) * learners
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        chosen: dict[str, Any] = {
            "learners": learners,
            "data.batch": 1,
            "budget.epochs": 1,
            "metrics.every_s": 1,
            "checkpoint.every_epochs": checkpoint_every_s / seconds,
            "checkpoint.keep": int(seconds / checkpoint_every_s) + 1,
            "settings.steps": steps,
            "settings.trace": folder,
        }
        words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "roundelay", "train", f"{__name__}:Emulated", "--out", str(out), *words]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RoundelayError(f"the measured run failed: {ended.stderr.strip()}")
        return costs(_traces(Path(folder), out, learners))


def _traces(folder: Path, run: Path, learners: int) -> list[Trace]:
    wrote: dict[int, set[int]] = {learner: set() for learner in range(learners)}
    for row in read_rows(run / run_directory.METRICS):
        if row["kind"] == "learner":
            wrote[row["learner"]].add(row["steps"])
    savings = sorted(_made(each) for each in (run / "checkpoints").iterdir() if each.is_dir())
    times = [np.load(folder / f"{learner}.npy") for learner in range(learners)]
    return [
        Trace(each[each > 0], frozenset(wrote[learner]), savings[:-1])  # the last checkpoint comes after the last step
        for learner, each in enumerate(times)
    ]


def _made(checkpoint: Path) -> tuple[float, float]:
    times = [file.stat().st_mtime for file in checkpoint.iterdir()]
    return min(times) - AROUND_S, max(times) + AROUND_S
