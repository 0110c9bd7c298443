"""Digits whose learners take a given time for a step, so that who is faster does not depend on the machine."""

from __future__ import annotations

import os
import random
import time

from torch import Tensor, nn

from roundelay.training.tiny import Digits

PACES_S = (
    0.012,
    0.018,
    0.028,
    0.060,
)  # of learners 0 to 3, before anything is computed; each step up to a third more or less
PACED = "PACED_DIGITS"  # set in real learners; on the virtual clock time is not spent


class PacedDigits(Digits):
    """As Digits; in a real learner a step begins with a nap."""

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if PACED in os.environ:
            pace_s = PACES_S[int(os.environ["LOCAL_RANK"])]
            time.sleep(random.uniform(2 / 3 * pace_s, 4 / 3 * pace_s))
        return super().loss(module, batch)
