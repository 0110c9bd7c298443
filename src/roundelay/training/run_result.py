"""A run that is over: the mean model that it left, built again, and what it is worth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from roundelay.errors import ConfigError, unknown
from roundelay.training import config as configuration, run_directory
from roundelay.training.config import TaskConfig
from roundelay.training.evaluator import evaluating
from roundelay.training.recipes import task_class
from roundelay.training.task import Task

SPLITS = ("valid", "test")


@dataclass(frozen=True)
class FinishedRun:
    """The directory of a finished run, and what its config.json says."""

    folder: Path
    task_class: type[Task]
    settings: TaskConfig
    seed: int

    @classmethod
    def read(cls, folder: Path) -> FinishedRun:
        """Raises ConfigError if there is no run, or one that is not finished."""
        path = folder / "config.json"
        if not path.is_file() or not (folder / run_directory.MODEL).is_file():
            begun = (folder / run_directory.CONFIG).is_file()
            how = "is not finished; go on with it: roundelay train RECIPE --resume --out" if begun else "holds no run:"
            raise ConfigError(f"'{folder}' {how} {folder if begun else 'there is no config.json'}")
        described = json.loads(path.read_text())
        chosen = task_class(described["task"])
        return cls(folder, chosen, configuration.read(chosen.Config, described["settings"]), described["seed"])

    def task(self) -> Task:
        """The task, with its data."""
        return self.task_class(self.settings, self.seed)

    def with_weights(self, module: nn.Module) -> nn.Module:
        """The module with the weights of the mean model."""
        module.load_state_dict(load_file(self.folder / run_directory.MODEL))
        return module.eval()

    def figures(self, split: str) -> dict[str, Any]:
        """The figures of `Task.evaluate` on a split."""
        if split not in SPLITS:
            raise ConfigError(unknown("split", split, SPLITS))
        task = self.task()
        module = self.with_weights(task.module())
        with evaluating(module):
            sums = task.evaluate(module, split)
        samples = sums.pop("samples")
        return {"split": split, "samples": int(samples)} | {name: sums[name] / max(samples, 1.0) for name in sums}
