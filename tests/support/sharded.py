"""A small model with uneven rows, and its data: the same in shards and whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NODES, SHARDS = 2, 2
STEPS, HALF = 8, 4
LOCAL_STEPS = 3  # so that replicas differ after the last step
OPTIMIZERS = {
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01),
}


class Model(nn.Module):
    """7 rows do not divide by 2, 1 row leaves the second shard empty, and `scale` belongs to the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(node: int, step: int) -> Tensor:
    """The batch of a node; each of its processes takes an equal part."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * node + step), dtype=torch.float64)


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return (module(x) - x[:, :3].sin()).square().mean()
