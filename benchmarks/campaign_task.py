"""Digits whose steps mostly sleep, so that many learners survive a campaign of faults on a machine with few cores.

cd benchmarks && roundelay chaos campaign_task:SleepingDigits --learners 4 --epochs 200 --campaign 60 --every 5s
"""

from __future__ import annotations

import time

from torch import Tensor, nn

from roundelay.training.tiny import Digits

STEP_S = 0.15


class SleepingDigits(Digits):
    """Every step takes `STEP_S` longer."""

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss, after a sleep."""
        time.sleep(STEP_S)
        return super().loss(module, batch)
