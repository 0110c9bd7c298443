"""Digits in a learner whose disk is full during some of its steps: no file can be written, also no log."""

from __future__ import annotations

import resource
import time

from torch import Tensor, nn

from roundelay.training.tiny import Digits

FULL = range(40, 120)  # steps


class FullDisk(Digits):
    steps = 0

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.01)
        self.steps += 1
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if self.steps in FULL else hard, hard))
        return super().loss(module, batch)
