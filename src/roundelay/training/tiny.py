"""A task that trains in seconds: handwritten digits, which scikit-learn carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundelay.training.config import at_least
from roundelay.training.task import Task, TaskConfig

SPLITS = {"train": slice(0, 1300), "valid": slice(1300, 1550), "test": slice(1550, None)}


@dataclass(frozen=True)
class DigitsConfig(TaskConfig):
    """Attributes: hidden, the width of the network; dropout, of its hidden layer."""

    hidden: int = at_least(1, 128)
    dropout: float = at_least(0.0, 0.1)


class Digits(Task):
    """8 x 8 images of digits, a perceptron with one hidden layer."""

    Config = DigitsConfig
    judged_by = "accuracy"
    config: DigitsConfig

    def __init__(self, config: DigitsConfig, seed: int) -> None:
        super().__init__(config, seed)
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        self._images = (torch.tensor(digits.data, dtype=torch.float32) / 16)[order]
        self._labels = torch.tensor(digits.target)[order]

    def __len__(self) -> int:
        return int(SPLITS["train"].stop)

    def module(self) -> nn.Module:
        """64 - hidden - 10."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            hidden = self.config.hidden
            return nn.Sequential(
                nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(self.config.dropout), nn.Linear(hidden, 10)
            )

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images and labels."""
        chosen = torch.tensor(samples)
        return self._images[chosen], self._labels[chosen]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return cross_entropy(module(images), labels)

    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """Loss and accuracy."""
        images, labels = (each[SPLITS[split]][part::parts] for each in (self._images, self._labels))
        device = next(module.parameters()).device
        logits = module(images.to(device)).cpu()
        return {
            "samples": float(len(labels)),
            "loss": float(cross_entropy(logits, labels, reduction="sum")),
            "accuracy": float((logits.argmax(1) == labels).sum()),
        }
