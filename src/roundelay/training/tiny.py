"""A task that trains in seconds: the handwritten digits of scikit-learn."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundelay.errors import MissingExtraError
from roundelay.training.config import at_least, fraction
from roundelay.training.task import Task, TaskConfig

SPLITS = {"train": slice(0, 1300), "valid": slice(1300, 1550), "test": slice(1550, None)}


@dataclass(frozen=True)
class DigitsConfig(TaskConfig):
    """Settings of `Digits`.

    Attributes:
        hidden: width of the hidden layer.
        dropout: share of the hidden layer that is dropped in training.
    """

    hidden: int = at_least(1, 128)
    dropout: float = fraction(0.1)


class Digits(Task):
    """Images of 8 x 8 pixels, classified by a perceptron with one hidden layer.

    Raises MissingExtraError if scikit-learn is not installed.
    """

    Config = DigitsConfig
    judged_by = "accuracy"
    config: DigitsConfig

    def __init__(self, config: DigitsConfig, seed: int) -> None:
        super().__init__(config, seed)
        images, labels = digits_dataset()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self._images, self._labels = images[order], labels[order]

    @classmethod
    def check_data(cls, config: DigitsConfig) -> None:
        """Raise MissingExtraError if scikit-learn, which has the images, is not installed."""
        digits_dataset()

    def __len__(self) -> int:
        return int(SPLITS["train"].stop)

    def module(self) -> nn.Module:
        """Layers of 64, `hidden` and 10 units."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            hidden = self.config.hidden
            return nn.Sequential(
                nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(self.config.dropout), nn.Linear(hidden, 10)
            )

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images (values from 0 to 1) and labels."""
        chosen = torch.tensor(samples)
        return self._images[chosen], self._labels[chosen]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy."""
        images, labels = batch
        return cross_entropy(module(images), labels)

    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """Sums of the cross-entropy (loss) and of correct answers (accuracy)."""
        images, labels = (each[SPLITS[split]][part::parts] for each in (self._images, self._labels))
        device = next(module.parameters()).device
        logits = module(images.to(device)).cpu()
        return {
            "samples": float(len(labels)),
            "loss": float(cross_entropy(logits, labels, reduction="sum")),
            "accuracy": float((logits.argmax(1) == labels).sum()),
        }


def digits_dataset() -> tuple[Tensor, Tensor]:
    """1797 handwritten digits of 8 x 8 pixels: images (1797, 64) with values from 0 to 1, and labels.

    The file belongs to scikit-learn, which is not imported: that takes as long as importing torch, in every learner.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise MissingExtraError("the digits dataset", "digits")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",", dtype=np.int64)
    return torch.from_numpy(table[:, :-1]).float() / 16, torch.from_numpy(table[:, -1].copy())
