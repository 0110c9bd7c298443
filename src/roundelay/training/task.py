"""What a run trains: a model, numbered samples, a loss, and figures that say how good a model is."""

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

Batch: TypeAlias = Any  # tensors, or tuples and dictionaries of tensors: what `loss` of the same task takes


class Task(ABC):
    """A model and its data. Every learner builds its own task from the same configuration.

    Samples are numbered from 0 to len(task) - 1. Roundelay decides which learner trains on which samples, and when.

    Attributes:
        Config: the dataclass of the settings. Its fields are the keys of the `[settings]` table.
        judged_by: the figure of `evaluate` that says which model is best, with '-' before it if less is better.
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
        """Number of training samples."""

    @abstractmethod
    def module(self) -> nn.Module:
        """A new model, with the same weights on every call: draw them from a generator seeded by `seed`."""

    @abstractmethod
    def batch(self, samples: Sequence[int], generator: torch.Generator) -> Batch:
        """The samples with these numbers, as `loss` takes them. Draw random numbers (augmentation) from `generator`.

        May run in a worker process. The result must not depend on the process, nor on earlier calls.
        """

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the samples of the batch."""

    @abstractmethod
    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """Sums over the samples part, part + parts, part + 2 parts, ... of a split.

        The result has the number of these samples as `samples`, and the sum of every figure. For example
        {"samples": 100.0, "loss": 52.3, "accuracy": 91.0}, where accuracy is the number of correct answers.
        Every learner evaluates one part. The caller adds the sums of all parts, and divides every figure by `samples`.
        The split is "valid" or "test". The module is in evaluation mode, and no gradients are recorded.
        """

    def parameter_groups(self, module: nn.Module) -> Iterable[Any]:
        """The parameters, or parameter groups, of the optimizer. Override it to give some weights other settings."""
        return module.parameters()

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """The batch with its tensors on `device`."""
        return _moved(batch, device)

    def describe(self, mean: nn.Module) -> dict[str, Any]:
        """What results.json says about the final mean model besides its figures, such as {"sample": "a text"}.

        The module is in evaluation mode. Only one learner calls this method, at the end of the run.
        """
        return {}

    def leave(self, run: Path) -> None:
        """Write the files that the model needs, other than weights and settings, to the directory of the run.

        Only one learner calls this method, at the end of the run.
        """

    @classmethod
    def evaluate_run(cls, run: Path, split: str, data: Path | None = None, passes: int | None = None) -> dict[str, Any]:
        """The figures of the mean model of a finished run, for `roundelay evaluate`.

        By default the figures of `evaluate`. A task may override it to compute others, such as word errors, to take
        data that the run never saw, and to write files into the directory of the run.

        Raises ConfigError for an unknown split, and for data that the task cannot take.
        """
        from roundelay.training.run_result import RunResult  # that module imports this one

        if data is not None or passes is not None:
            option = "--passes" if data is None else "--corpus"
            raise ConfigError(f"{option} is for runs of speech recognition; '{run}' is one of {cls.__name__}")
        return RunResult.read(run).figures(split)


def _moved(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
