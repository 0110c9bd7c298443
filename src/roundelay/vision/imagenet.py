"""The training task ImageNet, or any other images in class folders."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from roundelay.errors import DataError, check_installed
from roundelay.training.config import TaskConfig, at_least
from roundelay.vision import transforms
from roundelay.vision.classification import EVALUATION_BATCH, Classification, Images
from roundelay.vision.folders import ClassFolder
from roundelay.vision.resnet import imagenet_resnet

log = logging.getLogger("roundelay")


@dataclass(frozen=True)
class ImageNetConfig(TaskConfig):
    """Settings of ImageNet.

    Attributes:
        data: a folder with train/ and val/, each with one folder per class.
        model: the network.
        image_size: side of the square input of the network, in pixels.
        label_smoothing: probability that is spread over all classes.
        threads: threads that decode images for evaluation; for training, `data.workers` processes decode.
    """

    data: str = ""
    model: Literal["resnet18", "resnet34", "resnet50"] = "resnet50"
    image_size: int = at_least(32, 224)
    label_smoothing: float = at_least(0.0, 0.1)
    threads: int = at_least(1, 4)


class ImageNet(Classification):
    """Images in class folders, decoded on demand. Both "valid" and "test" are val/, since ImageNet's test labels are secret.

    An image that cannot be decoded is replaced by the next one in training, and left out in evaluation. An evaluation reports
    `unreadable`, the number of images left out per evaluated image. The log reports unreadable training images.
    """

    Config = ImageNetConfig
    mean, std = transforms.IMAGENET_MEAN, transforms.IMAGENET_STD

    def __init__(self, config: ImageNetConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._logged_unreadable = 0
        self.train, self.val = ClassFolder(Path(config.data) / "train"), ClassFolder(Path(config.data) / "val")
        if self.train.classes != self.val.classes:
            different = sorted(set(self.train.classes) ^ set(self.val.classes))
            raise DataError(
                f"train and val in {config.data} must have the same classes; only one of them has: {', '.join(different)}"
            )

    @classmethod
    def check_data(cls, config: ImageNetConfig) -> None:
        """Raise DataError unless there are folders for training and validation, and MissingExtraError without Pillow."""
        if not config.data:
            raise DataError("ImageNet needs its folder, which has train/ and val/; give it with --data")
        for folder in (Path(config.data).expanduser() / "train", Path(config.data).expanduser() / "val"):
            if not folder.is_dir():
                raise DataError(f"there is no folder {folder}; it should have one folder per class, with images")
        check_installed("PIL", "reading images", "vision")

    def __len__(self) -> int:
        return len(self.train)

    def network(self) -> nn.Module:
        """The configured ResNet, with one class per folder."""
        return imagenet_resnet(self.config.model, len(self.train.classes))

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> Images:
        """Random crops of training images as bytes, scaled and mirrored at random, and their labels."""
        images, labels = zip(*map(self.train.readable, samples), strict=True)
        size = self.config.image_size
        return torch.stack([transforms.for_training(each, size, generator) for each in images]), torch.tensor(labels)

    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """The sums of `Classification.evaluate` and `unreadable`. Also logs the number of unreadable training images."""
        sums = super().evaluate(module, split, part, parts)
        unreadable = self.train.unreadable
        if unreadable > self._logged_unreadable:
            self._logged_unreadable = unreadable
            log.warning("%d of %d training images could not be read and were replaced", unreadable, len(self.train))
        return sums | {"unreadable": len(range(part, len(self.val), parts)) - sums["samples"]}

    def evaluation_batches(self, split: str, part: int, parts: int) -> Iterator[Images]:
        """Centres of decodable images. Threads decode them, since Pillow's decoder runs without Python's global lock."""
        ahead: deque[list[Future[tuple[Tensor, int] | None]]] = deque()
        with ThreadPoolExecutor(self.config.threads) as pool:
            samples = range(part, len(self.val), parts)
            for start in range(0, len(samples), EVALUATION_BATCH):
                ahead.append([pool.submit(self._centre, each) for each in samples[start : start + EVALUATION_BATCH]])
                if len(ahead) > 1:  # one batch is decoded while another one is evaluated
                    yield from _gathered(ahead.popleft())
            for last in ahead:
                yield from _gathered(last)

    def _centre(self, sample: int) -> tuple[Tensor, int] | None:
        image = self.val.image(sample)
        if image is None:
            return None
        return transforms.for_evaluation(image, self.config.image_size), self.val.labels[sample]


def _gathered(futures: list[Future[tuple[Tensor, int] | None]]) -> Iterator[Images]:
    """One batch of the images that could be decoded; no batch if none could."""
    found = [result for future in futures if (result := future.result()) is not None]
    if found:
        images, labels = zip(*found, strict=True)
        yield torch.stack(images), torch.tensor(labels)
