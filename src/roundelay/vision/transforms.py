"""Image transforms: crops, mirroring, normalisation. All randomness comes from the generator that is passed in.

Boxes are (left, top, right, bottom) in pixels, as in Pillow. Images stay bytes until `normalised`: a worker process then sends a
quarter of the data that float32 would need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from PIL.Image import Image

Box: TypeAlias = tuple[int, int, int, int]

# Of RGB values in 0..1; torchvision's weights expect these.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AREA = (0.08, 1.0)  # area of a random crop / area of the image (Szegedy et al. 2014)
RATIO = (3 / 4, 4 / 3)  # width / height of a random crop
ATTEMPTS = 10
CENTRE = 224 / 256  # side of the centre crop / shorter side of the image


def random_box(width: int, height: int, generator: torch.Generator) -> Box:
    """A random box: its area, relative to the image, is uniform in AREA, and its ratio is log-uniform in RATIO.

    If ATTEMPTS boxes do not fit (a very long image), it is the largest centred box with a ratio in RATIO.
    """
    for _ in range(ATTEMPTS):
        area = width * height * _uniform(*AREA, generator)
        ratio = math.exp(_uniform(math.log(RATIO[0]), math.log(RATIO[1]), generator))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return _box(_integer(width - w + 1, generator), _integer(height - h + 1, generator), w, h)
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return centre_box(width, height, w, h)


def centre_box(width: int, height: int, w: int, h: int) -> Box:
    """The box of w x h pixels in the centre.

    >>> centre_box(341, 256, 224, 224)
    (58, 16, 282, 240)
    """
    return _box(round((width - w) / 2), round((height - h) / 2), w, h)


def shorter_side(width: int, height: int, side: int) -> tuple[int, int]:
    """Width and height after the shorter one is scaled to `side`.

    >>> shorter_side(500, 375, 256)
    (341, 256)
    """
    return (side, side * height // width) if width <= height else (side * width // height, side)


def for_training(image: Image, size: int, generator: torch.Generator) -> Tensor:
    """A random box, scaled to size x size and mirrored with probability 1/2: bytes (3, size, size)."""
    from PIL.Image import Resampling

    cropped = image.crop(random_box(*image.size, generator)).resize((size, size), Resampling.BILINEAR)
    pixels = as_bytes(cropped)
    return pixels.flip(-1) if _integer(2, generator) else pixels


def for_evaluation(image: Image, size: int) -> Tensor:
    """The centre of the image after its shorter side is scaled to size / CENTRE: bytes (3, size, size)."""
    from PIL.Image import Resampling

    scaled = image.resize(shorter_side(*image.size, round(size / CENTRE)), Resampling.BILINEAR)
    return as_bytes(scaled.crop(centre_box(*scaled.size, size, size)))


def as_bytes(image: Image) -> Tensor:
    """An RGB image as bytes (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def shifted_and_mirrored(images_BCHW: Tensor, shift: int, generator: torch.Generator) -> Tensor:
    """Images, each moved by up to `shift` pixels (padding is black) and mirrored with probability 1/2."""
    count, _, height, width = images_BCHW.shape
    padded = pad(images_BCHW, (shift,) * 4)
    tops, lefts = torch.randint(2 * shift + 1, (2, count, 1, 1, 1), generator=generator)
    mirrored = torch.randint(2, (count, 1, 1, 1), generator=generator).bool()
    rows = tops + torch.arange(height).view(1, 1, -1, 1)
    across = torch.arange(width).view(1, 1, 1, -1)
    columns = lefts + torch.where(mirrored, width - 1 - across, across)
    channels = torch.arange(padded.shape[1]).view(1, -1, 1, 1)
    return padded[torch.arange(count).view(-1, 1, 1, 1), channels, rows, columns]


def normalised(images_BCHW: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x / 255 - mean) / std per channel, in the channels-last layout.

    Convolutions are faster in this layout, and their outputs have it too. Weights keep their own layout, so that exchanges need
    no reordering.
    """
    scale = 1 / (255 * torch.tensor(std, device=images_BCHW.device))
    offset = -torch.tensor(mean, device=images_BCHW.device) / torch.tensor(std, device=images_BCHW.device)
    x = images_BCHW.to(torch.float32, memory_format=torch.channels_last)
    return x.mul_(scale.view(1, -1, 1, 1)).add_(offset.view(1, -1, 1, 1))


def _box(left: int, top: int, w: int, h: int) -> Box:
    return left, top, left + w, top + h


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def _integer(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))
