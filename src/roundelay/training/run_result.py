"""The result of a run: the mean model, how to build it again, and its figures."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file, save
from torch import nn

from roundelay.errors import ConfigError, unknown
from roundelay.training import run_directory
from roundelay.training.checkpoint import patiently, write_whole
from roundelay.training.config import Config, TaskConfig
from roundelay.training.config_table import read
from roundelay.training.evaluator import SPLITS, evaluating, means
from roundelay.training.recipes import as_table, task_class
from roundelay.training.task import Task
from roundelay.weights.serialization import UNREADABLE

Model = TypeVar("Model", bound=nn.Module)


def write_result(folder: Path, config: Config, task: Task, mean: nn.Module, results: dict[str, Any]) -> dict[str, Any]:
    """Write the files of a finished run: the model, what is needed to build it again, and `results` as results.json.

    results.json is written last: a run that has it is finished. A full disk is waited for. Returns what is in results.json.
    """
    with evaluating(mean):
        results = {"finished": True} | results | task.describe(mean)
    patiently(lambda: _write_files(folder, config, task, mean, results))
    return results


def _write_files(folder: Path, config: Config, task: Task, mean: nn.Module, results: dict[str, Any]) -> None:
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in mean.state_dict().items()}
    write_whole(folder / run_directory.MODEL, save(tensors))
    described = {"task": config.task, "settings": as_table(config)["settings"], "seed": config.seed}
    write_whole(folder / run_directory.MODEL_CONFIG, json.dumps(described, indent=2).encode())
    task.leave(folder)
    write_whole(folder / run_directory.RESULTS, json.dumps(results, indent=2).encode())


@dataclass(frozen=True)
class RunResult:
    """A finished run: its directory, its task, and the settings and seed that the task had."""

    folder: Path
    task_class: type[Task]
    settings: TaskConfig
    seed: int

    @classmethod
    def read(cls, folder: Path) -> RunResult:
        """Read the result in the directory of a run.

        Raises ConfigError if there is no run, if it is not finished, or if a file of the result is damaged.
        """
        path = folder / run_directory.MODEL_CONFIG
        if not path.is_file() or not (folder / run_directory.MODEL).is_file():
            if (folder / run_directory.CONFIG).is_file():
                if place := _place_of_model(folder):
                    raise ConfigError(f"the model of the run in '{folder}' is on another machine, in {place}")
                command = run_directory.resume_command(folder)
                raise ConfigError(f"the run in '{folder}' is not finished; go on with it: {command}")
            raise ConfigError(f"'{folder}' holds no run: there is no {run_directory.CONFIG}")
        try:
            described = json.loads(path.read_text())
            name, settings, seed = str(described["task"]), dict(described["settings"]), int(described["seed"])
        except UNREADABLE as error:
            raise ConfigError(_damaged(path, error)) from None
        chosen = task_class(name)
        return cls(folder, chosen, read(chosen.Config, settings), seed)

    def task(self) -> Task:
        """Build the task. This reads the data of the task."""
        return self.task_class(self.settings, self.seed)

    def with_weights(self, module: Model) -> Model:
        """Load the weights of the mean model into the module. Returns the module, in evaluation mode.

        Raises ConfigError if the file of the model is damaged.
        """
        path = self.folder / run_directory.MODEL
        try:
            module.load_state_dict(load_file(path))
        except (*UNREADABLE, RuntimeError) as error:  # RuntimeError: the weights of another model
            raise ConfigError(_damaged(path, error)) from None
        return module.eval()

    def figures(self, split: str) -> dict[str, Any]:
        """Evaluate the mean model on a split. Raises ConfigError for an unknown split."""
        if split not in SPLITS:
            raise ConfigError(unknown("split", split, SPLITS))
        task = self.task()
        module = self.with_weights(task.module())
        with evaluating(module):
            sums = task.evaluate(module, split)
        return {"split": split, "samples": int(sums["samples"])} | means(sums)


def _place_of_model(folder: Path) -> str:
    """The host and the directory that have the model, if the run has finished on several machines; else empty."""
    with contextlib.suppress(*UNREADABLE):
        return str(json.loads((folder / run_directory.RESULTS).read_text()).get(run_directory.MODEL_PLACE, ""))
    return ""


def _damaged(path: Path, error: Exception) -> str:
    reason = str(error).partition("\n")[0].rstrip(":")
    return f"'{path}' is damaged ({type(error).__name__}: {reason}); bring it back from a copy, or train again"
