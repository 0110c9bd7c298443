r"""Residual networks (He et al. 2015): $y = \mathrm{relu}(x + F(x))$, with the parameter names and shapes of torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.functional import relu

from roundelay.errors import ConfigError, unknown


class Stem(NamedTuple):
    """The first convolution: channels of the images, kernel size, stride, and whether a 3 x 3 max-pooling follows."""

    colours: int
    kernel: int
    stride: int
    pool: bool


IMAGENET_STEM = Stem(colours=3, kernel=7, stride=2, pool=True)
FASHION_STEM = Stem(colours=1, kernel=5, stride=3, pool=False)


def conv(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that divides the image size by the stride. It has no bias, because a BatchNorm follows."""
    return nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """relu(x + F(x)), where F is `residual`. If F changes the shape, x goes through the 1 x 1 convolution `downsample`.

    Attributes:
        expansion: output channels / `width`.
    """

    expansion: ClassVar[int]

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(conv(channels, out, 1, stride), nn.BatchNorm2d(out))

    def residual(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return relu(shortcut + self.residual(x))


class BasicBlock(Block):
    """F: two 3 x 3 convolutions, each with BatchNorm, and relu between them; for shallow networks."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__(channels, width, stride)
        self.conv1, self.bn1 = conv(channels, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        nn.init.zeros_(self.bn2.weight)

    def residual(self, x: Tensor) -> Tensor:
        x = relu(self.bn1(self.conv1(x)))
        return cast(Tensor, self.bn2(self.conv2(x)))


class Bottleneck(Block):
    """F: convolutions 1 x 1, 3 x 3 and 1 x 1, with BatchNorm and relu as in `BasicBlock`.

    The 3 x 3 has the stride, as in torchvision ("ResNet v1.5").
    """

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__(channels, width, stride)
        out = width * self.expansion
        self.conv1, self.bn1 = conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, out, 1), nn.BatchNorm2d(out)
        nn.init.zeros_(self.bn3.weight)

    def residual(self, x: Tensor) -> Tensor:
        x = relu(self.bn1(self.conv1(x)))
        x = relu(self.bn2(self.conv2(x)))
        return cast(Tensor, self.bn3(self.conv3(x)))


class ResNet(nn.Module):
    """Stem, groups of blocks, mean over pixels, linear classifier. Each group but the first halves the image size.

    Convolutions are initialised by He's normal distribution (fan-out). The last BatchNorm of a block starts with weight zero, so
    that every block starts as the identity (Goyal et al. 2017).

    Args:
        block: BasicBlock or Bottleneck.
        depths: number of blocks of each group.
        widths: channels of each group, before the block's expansion.
        classes: number of logits.
        stem: the layers before the first group.
    """

    def __init__(
        self,
        block: type[Block],
        depths: Sequence[int],
        widths: Sequence[int],
        classes: int,
        stem: Stem = IMAGENET_STEM,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(stem.colours, widths[0], stem.kernel, stem.stride), nn.BatchNorm2d(widths[0])
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stem.pool else nn.Identity()
        channels = widths[0]
        for number, (depth, width) in enumerate(zip(depths, widths, strict=True), start=1):
            first = block(channels, width, 1 if number == 1 else 2)
            channels = width * block.expansion
            group = nn.Sequential(first, *(block(channels, width, 1) for _ in range(depth - 1)))
            self.add_module(f"layer{number}", group)
        self.depth = len(depths)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        x = self.maxpool(relu(self.bn1(self.conv1(images))))
        for number in range(1, self.depth + 1):
            x = self.get_submodule(f"layer{number}")(x)
        return cast(Tensor, self.fc(x.mean((2, 3))))


IMAGENET_MODELS: dict[str, tuple[type[Block], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
}


def imagenet_resnet(name: str, classes: int = 1000) -> ResNet:
    """ResNet-18, -34 or -50. It can load a state_dict of torchvision's network of that name.

    >>> sum(weight.numel() for weight in imagenet_resnet("resnet18").parameters())
    11689512
    """
    if name not in IMAGENET_MODELS:
        raise ConfigError(unknown("model", name, IMAGENET_MODELS))
    block, depths = IMAGENET_MODELS[name]
    return ResNet(block, depths, (64, 128, 256, 512), classes)


def fashion_resnet(width: int = 16) -> ResNet:
    """A ResNet for 28 x 28 grey pixels and 10 classes: three groups of one block with width, 2 width and 4 width channels.

    >>> sum(weight.numel() for weight in fashion_resnet(16).parameters())
    78010
    """
    return ResNet(BasicBlock, (1, 1, 1), (width, 2 * width, 4 * width), 10, FASHION_STEM)
