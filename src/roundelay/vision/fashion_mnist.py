"""The training task Fashion-MNIST."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from roundelay.training.config import TaskConfig, at_least
from roundelay.vision import transforms
from roundelay.vision.classification import EVALUATION_BATCH, Classification, Images
from roundelay.vision.fashion_mnist_files import FashionMnistData, Labelled, find_fashion_mnist
from roundelay.vision.resnet import fashion_resnet

SHIFT = 2  # pixels by which training images are moved; a larger shift would cut off sleeves and heels


@dataclass(frozen=True)
class FashionMnistConfig(TaskConfig):
    """Settings of Fashion-MNIST.

    Attributes:
        data: the archive, or a folder with the archive or the idx files; empty: $ROUNDELAY_DATA.
        width: channels of the network's first group; the next groups have twice and four times as many.
        label_smoothing: probability that is spread over all classes.
        augment: shift and mirror the training images at random.
    """

    data: str = ""
    width: int = at_least(1, 16)
    label_smoothing: float = at_least(0.0, 0.0)
    augment: bool = True


class FashionMnist(Classification):
    """Ten kinds of clothes in 28 x 28 grey pixels: 55,000 images for training, 5,000 for validation, 10,000 for testing."""

    Config = FashionMnistConfig
    mean, std = (0.286,), (0.353,)  # of the training images

    def __init__(self, config: FashionMnistConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.data = FashionMnistData.load(config.data)

    @classmethod
    def check_data(cls, config: FashionMnistConfig) -> None:
        """Raise DataError unless the files are there."""
        find_fashion_mnist(config.data)

    def __len__(self) -> int:
        return len(self.data.train)

    def network(self) -> nn.Module:
        return fashion_resnet(self.config.width)

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> Images:
        """Training images as bytes, shifted and mirrored at random, and their labels."""
        which = torch.as_tensor(samples)
        images = self.data.train.images[which]
        if self.config.augment:
            images = transforms.shifted_and_mirrored(images, SHIFT, generator)
        return images, self.data.train.labels[which]

    def evaluation_batches(self, split: str, part: int, parts: int) -> Iterator[Images]:
        chosen: Labelled = getattr(self.data, split)[part::parts]
        return zip(chosen.images.split(EVALUATION_BATCH), chosen.labels.split(EVALUATION_BATCH), strict=True)
