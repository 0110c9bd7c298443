"""Digits with a given minimum time for each step, so that the speed of learners does not depend on the machine."""

from __future__ import annotations

import os
import random
import time

from torch import Tensor, nn

from roundelay.cluster.elastic_world import LEARNER
from roundelay.training.tiny import Digits

SLEEP_S = (0.012, 0.018, 0.028, 0.060)  # mean sleep at the start of a step, of learners 0 to 3


class PacedDigits(Digits):
    """Digits; in a real learner a step begins with a sleep of up to a third more or less than its mean."""

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        learner = os.environ.get(LEARNER)  # not set in a simulation, which models the time instead
        if learner is not None:
            time.sleep(SLEEP_S[int(learner)] * random.uniform(2 / 3, 4 / 3))
        return super().loss(module, batch)
