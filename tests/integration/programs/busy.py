"""A task whose steps keep one core busy: data, forward and backward are matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from roundelay.training.tiny import Digits

_MATRIX = torch.full((384, 384), 1 / 384)


class BusyDigits(Digits):
    def module(self) -> nn.Module:
        """Layers that are wide enough for a backward pass of some milliseconds."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            wide = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]
            return nn.Sequential(nn.Linear(64, 512), *wide, nn.Linear(512, 10))

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            _MATRIX @ _MATRIX
        images, labels = super().batch(samples, generator)
        return images.repeat(12, 1), labels.repeat(12)
