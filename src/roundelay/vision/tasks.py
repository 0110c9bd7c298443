"""The tasks of vision: Fashion-MNIST for everyone, ImageNet for those who have it."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundelay.errors import ConfigError, DataError, unknown
from roundelay.training.config import TaskConfig, at_least
from roundelay.training.task import Task
from roundelay.vision import transforms
from roundelay.vision.data import FashionMnistData, Labelled, find_fashion_mnist
from roundelay.vision.folders import ClassFolder
from roundelay.vision.resnet import fashion_resnet, imagenet_resnet

log = logging.getLogger("roundelay")

SHIFT = 2  # pixels, of a Fashion-MNIST image: more would push sleeves and heels out of it
EVALUATION_BATCH = 250

Images: TypeAlias = tuple[Tensor, Tensor]  # bytes (B, C, H, W) and labels (B,)


class Classification(Task):
    """Images in, one class out; judged by the share of images whose class gets the largest logit (top1).

    Attributes:
        mean: of a channel's values in 0..1, which is subtracted.
        std: by which it is divided.
    """

    judged_by = "top1"
    mean: ClassVar[Sequence[float]]
    std: ClassVar[Sequence[float]]

    @abstractmethod
    def network(self) -> nn.Module:
        """The network, with weights from torch's global generator."""

    @abstractmethod
    def evaluation_batches(self, split: str, part: int, parts: int) -> Iterable[Images]:
        """Every `parts`-th image of the split from `part` on, none of it random."""

    def module(self) -> nn.Module:
        """The network with weights drawn by `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.network()

    def logits(self, module: nn.Module, images_BCHW: Tensor) -> Tensor:
        """(B, classes), of images as bytes."""
        return cast(Tensor, module(transforms.normalised(images_BCHW, self.mean, self.std)))

    def loss(self, module: nn.Module, batch: Images) -> Tensor:
        """Cross-entropy with the labels, smoothed: probability 1 - s on the right class and s spread over all."""
        images, labels = batch
        return cross_entropy(self.logits(module, images), labels, label_smoothing=self.config.label_smoothing)

    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """Sums of samples, loss (without smoothing), top1 and top5: the class is the first, or among the first five."""
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
        """Weight decay for the weights of convolutions and of the classifier only: not for BatchNorm, not for biases."""
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        return [
            {"params": [weight for weight in weights if weight.ndim > 1]},
            {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
        ]


@dataclass(frozen=True)
class FashionMnistConfig(TaskConfig):
    """Settings of Fashion-MNIST.

    Attributes:
        data: the archive or a folder with it or with the idx files; empty: $ROUNDELAY_DATA.
        width: channels of the network's first group; the others have twice and four times as many.
        label_smoothing: probability spread over all classes.
        augment: shift and mirror the training images.
    """

    data: str = ""
    width: int = at_least(1, 16)
    label_smoothing: float = at_least(0.0, 0.0)
    augment: bool = True


class FashionMnist(Classification):
    """Ten kinds of clothes, 28 x 28 grey pixels: 55,000 images to train on, 5,000 to tune on ("valid"), 10,000 to test on."""

    Config = FashionMnistConfig
    mean, std = (0.286,), (0.353,)  # of the training images

    def __init__(self, config: FashionMnistConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.data = FashionMnistData.load(config.data)

    @classmethod
    def check(cls, config: FashionMnistConfig) -> None:
        """Raise ConfigError unless the data are there."""
        find_fashion_mnist(config.data)

    def __len__(self) -> int:
        return len(self.data.train)

    def network(self) -> nn.Module:
        """A narrow ResNet."""
        return fashion_resnet(self.config.width)

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> Images:
        """Images as bytes, each shifted and mirrored at random, and their labels."""
        which = torch.as_tensor(samples)
        images = self.data.train.images[which]
        if self.config.augment:
            images = transforms.shifted_and_mirrored(images, SHIFT, generator)
        return images, self.data.train.labels[which]

    def evaluation_batches(self, split: str, part: int, parts: int) -> Iterator[Images]:
        """As they are."""
        chosen: Labelled = getattr(self.data, split)[part::parts]
        return zip(chosen.images.split(EVALUATION_BATCH), chosen.labels.split(EVALUATION_BATCH), strict=True)


@dataclass(frozen=True)
class ImageNetConfig(TaskConfig):
    """Settings of ImageNet.

    Attributes:
        data: the folder with train/ and val/, each with one folder per class.
        model: which network.
        image_size: pixels of the square that the network sees.
        label_smoothing: probability spread over all classes.
        threads: that decode images for evaluation; for training, `data.workers` processes do.
    """

    data: str = ""
    model: Literal["resnet18", "resnet34", "resnet50"] = "resnet50"
    image_size: int = at_least(32, 224)
    label_smoothing: float = at_least(0.0, 0.1)
    threads: int = at_least(1, 4)


class ImageNet(Classification):
    """Images in class folders, decoded as they are asked for; both "valid" and "test" are val/, for test labels are secret.

    An image that cannot be decoded is replaced by its neighbour in training, left out in evaluation, and counted: the
    figure `unreadable` of an evaluation is how many there were for each image that was judged, and the log says how many of
    the images to train on there were.
    """

    Config = ImageNetConfig
    mean, std = transforms.IMAGENET_MEAN, transforms.IMAGENET_STD

    def __init__(self, config: ImageNetConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._told = 0
        self.train, self.val = ClassFolder(Path(config.data) / "train"), ClassFolder(Path(config.data) / "val")
        if self.train.classes != self.val.classes:
            different = sorted(set(self.train.classes) ^ set(self.val.classes))
            raise DataError(
                f"train and val in {config.data} must have the same classes; in one only: {', '.join(different)}"
            )

    @classmethod
    def check(cls, config: ImageNetConfig) -> None:
        """Raise ConfigError unless there are folders for training and validation."""
        if not config.data:
            raise DataError("no place for ImageNet was given; give the folder that has train/ and val/ (--data)")
        for folder in (Path(config.data).expanduser() / "train", Path(config.data).expanduser() / "val"):
            if not folder.is_dir():
                raise DataError(f"there is no folder {folder}; it should hold one folder per class, with its images")

    def __len__(self) -> int:
        return len(self.train)

    @property
    def unreadable(self) -> int:
        """How many different images could not be decoded so far, in training or evaluation."""
        return self.train.unreadable + self.val.unreadable

    def network(self) -> nn.Module:
        """The configured ResNet, with as many classes as there are folders."""
        return imagenet_resnet(self.config.model, len(self.train.classes))

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> Images:
        """Random boxes of the images, scaled, mirrored or not, as bytes; and their labels."""
        images, labels = zip(*map(self.train.readable, samples), strict=True)
        size = self.config.image_size
        return torch.stack([transforms.for_training(each, size, generator) for each in images]), torch.tensor(labels)

    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """The sums of every classification, and `unreadable`; those among the training images are logged so far."""
        sums = super().evaluate(module, split, part, parts)
        if self.train.unreadable > self._told:
            self._told = self.train.unreadable
            log.warning(
                "%d of %d training images could not be read so far; others stood in for them",
                self._told,
                len(self.train),
            )
        return sums | {"unreadable": len(range(part, len(self.val), parts)) - sums["samples"]}

    def evaluation_batches(self, split: str, part: int, parts: int) -> Iterator[Images]:
        """Centres of the images that can be decoded, by threads (Pillow's decoder runs without Python's lock)."""
        ahead: deque[list[Future[tuple[Tensor, int] | None]]] = deque()
        with ThreadPoolExecutor(self.config.threads) as pool:
            samples = range(part, len(self.val), parts)
            for start in range(0, len(samples), EVALUATION_BATCH):
                ahead.append([pool.submit(self._centre, each) for each in samples[start : start + EVALUATION_BATCH]])
                if len(ahead) > 1:  # one batch is being decoded while another is looked at
                    yield from _gathered(ahead.popleft())
            for last in ahead:
                yield from _gathered(last)

    def _centre(self, sample: int) -> tuple[Tensor, int] | None:
        image = self.val.image(sample)
        if image is None:
            return None
        return transforms.for_evaluation(image, self.config.image_size), self.val.labels[sample]


def _gathered(futures: list[Future[tuple[Tensor, int] | None]]) -> Iterator[Images]:
    """One batch of what could be decoded; none if nothing could."""
    found = [result for future in futures if (result := future.result()) is not None]
    if found:
        images, labels = zip(*found, strict=True)
        yield torch.stack(images), torch.tensor(labels)
