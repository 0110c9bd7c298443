"""Digits whose steps take a fixed time, half of it for the data and half of it in the forward pass."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from roundelay.training.tiny import Digits

DATA_S = FORWARD_S = 0.025


class SteadyDigits(Digits):
    def batch(self, samples: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        time.sleep(DATA_S)
        return super().batch(samples, generator)

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(FORWARD_S)
        return super().loss(module, batch)
