"""What a run trains: a model, numbered samples, a loss and the figures by which it is judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from roundelay.errors import ConfigError
from roundelay.training.config import TaskConfig

__all__ = ["Batch", "Task", "TaskConfig"]

Batch: TypeAlias = Any  # tensors, or tuples and dictionaries of tensors; whatever `loss` of the same task takes


class Task(ABC):
    """A model and its data. Every learner builds its own from the same configuration.

    Samples have numbers, 0 .. len(task)-1; which learner trains on which of them, and when, is not the task's business.

    Attributes:
        Config: the dataclass that `config` is an instance of; its fields are the keys of the `[settings]` table.
        judged_by: the figure of `evaluate` that says which model is best; it begins with '-' if less is better.
    """

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    judged_by: ClassVar[str] = "-loss"

    def __init__(self, config: Any, seed: int) -> None:  # noqa: ANN401  # each task's own dataclass
        self.config, self.seed = config, seed

    @classmethod
    def check(cls, config: Any) -> None:  # noqa: ANN401
        """Raise ConfigError for settings that cannot work. Called before learners start; must need no data."""

    @classmethod
    def check_data(cls, config: Any) -> None:  # noqa: ANN401
        """Raise ConfigError if the data that the settings name are not there. Called before learners start."""

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are to train on."""

    @abstractmethod
    def module(self) -> nn.Module:
        """A fresh model; the same on every call, for it draws from a generator seeded by `seed`."""

    @abstractmethod
    def batch(self, samples: Sequence[int], generator: torch.Generator) -> Batch:
        """These samples, as `loss` takes them. What is random about it (augmentation) comes from `generator`.

        May run in a worker process, and must not depend on which one, nor on what was asked for before.
        """

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the samples of a batch."""

    @abstractmethod
    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """Sums over every `parts`-th sample of `split`, from `part` on: `samples`, and others that are divided by it.

        For instance {"samples": 100.0, "loss": 52.3, "accuracy": 91.0}, where accuracy counts the correct ones: sums of
        several parts can be added. The split is "valid" or "test". The module is in evaluation mode and no gradients
        are recorded.
        """

    def parameter_groups(self, module: nn.Module) -> Iterable[Any]:
        """What the optimizer is built from; override to give some weights other settings."""
        return module.parameters()

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on another device."""
        return _moved(batch, device)

    def leave(self, run: Path) -> None:
        """Write into the folder of a run what its model needs beside weights and settings; one learner does, at the end."""

    @classmethod
    def evaluate_run(cls, run: Path, split: str, data: Path | None = None) -> dict[str, Any]:
        """What the mean model of a finished run is worth: the figures that `roundelay evaluate` shows.

        Those of `evaluate`, unless a task is judged by more than its own sums, as speech is by its words; such a task may
        leave files in the run, and may take data that the run never saw.

        Raises ConfigError for a split that is not there, and for data that the task cannot take.
        """
        from roundelay.training.run_result import FinishedRun  # which knows tasks

        if data is not None:
            raise ConfigError(f"--corpus is for runs of speech recognition; '{run}' is one of {cls.__name__}")
        return FinishedRun.read(run).figures(split)


def _moved(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
