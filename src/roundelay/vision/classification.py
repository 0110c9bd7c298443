"""Image classification as a training task: what Fashion-MNIST and ImageNet share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundelay.errors import ConfigError, unknown
from roundelay.training.task import Task
from roundelay.vision import transforms

EVALUATION_BATCH = 250

Images: TypeAlias = tuple[Tensor, Tensor]  # bytes (B, C, H, W) and labels (B,)


class Classification(Task):
    """Classification of images, judged by top1: the fraction of images whose class has the largest logit.

    Attributes:
        mean, std: of each channel's values in 0..1, for normalisation.
    """

    judged_by = "top1"
    mean: ClassVar[Sequence[float]]
    std: ClassVar[Sequence[float]]

    @abstractmethod
    def network(self) -> nn.Module:
        """A new network, with weights from torch's global random generator."""

    @abstractmethod
    def evaluation_batches(self, split: str, part: int, parts: int) -> Iterable[Images]:
        """Every `parts`-th image of the split from image `part` on, without augmentation."""

    def module(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.network()

    def logits(self, module: nn.Module, images_BCHW: Tensor) -> Tensor:
        """Logits (B, classes) of images as bytes."""
        return cast(Tensor, module(transforms.normalised(images_BCHW, self.mean, self.std)))

    def loss(self, module: nn.Module, batch: Images) -> Tensor:
        """Cross-entropy with smoothed labels: probability 1 - s for the right class, and s spread over all classes."""
        images, labels = batch
        return cross_entropy(self.logits(module, images), labels, label_smoothing=self.config.label_smoothing)

    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """Sums over a split: samples, loss (without smoothing), top1 and top5 (the class is among the five largest logits)."""
        if split not in ("valid", "test"):
            raise ConfigError(unknown("split", split, ("valid", "test")))
        device = next(module.parameters()).device
        sums = dict.fromkeys(("samples", "loss", "top1", "top5"), 0.0)
        for batch in self.evaluation_batches(split, part, parts):
            images, labels = self.to_device(batch, device)
            logits = self.logits(module, images)
            found = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
            sums["samples"] += len(labels)
            sums["loss"] += float(cross_entropy(logits, labels, reduction="sum"))
            sums["top1"] += float(found[:, 0].sum())
            sums["top5"] += float(found.sum())
        return sums

    def parameter_groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Weight decay only for weights of convolutions and of the classifier, not for BatchNorm and biases."""
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        return [
            {"params": [weight for weight in weights if weight.ndim > 1]},
            {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
        ]
