"""The digits of scikit-learn with steps of a fixed length, and learners that die at a given place.

PACED_FAULT=PLACE:LEARNER says where a learner dies (SIGKILL): in the "task" constructor, which a learner calls before it
registers, or in "module", which it calls between registering and its first step. Before a learner registers it has no id,
so the first LEARNER processes that make a file in PACED_FOLDER die. "raise:LEARNER" raises in the constructor.
PACED_EVALUATION_S=SECONDS makes the evaluation at the end of the run so long; it touches PACED_FOLDER/evaluating.
PACED_STEP_S=SECONDS is how much longer a step takes. Once there is a file PACED_FOLDER/hurry, steps take no longer than they
must: a test has seen what it waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from roundelay.training.tiny import Digits

STEP_S = float(os.environ.get("PACED_STEP_S", "0.05"))
FOLDER = Path(os.environ["PACED_FOLDER"])
EVALUATION_S = float(os.environ.get("PACED_EVALUATION_S", "0"))
PLACE, _, LEARNER = os.environ.get("PACED_FAULT", "").partition(":")


def _first_processes() -> bool:
    for index in range(int(LEARNER)):
        with contextlib.suppress(FileExistsError):
            (FOLDER / f"first-{index}").touch(exist_ok=False)
            return True
    return False


class PacedDigits(Digits):
    """Every step takes `STEP_S` longer until there is a file `hurry`."""

    def __init__(self, config, seed):
        super().__init__(config, seed)
        if PLACE in ("task", "raise") and _first_processes():
            if PLACE == "raise":
                raise ZeroDivisionError("this task cannot be built")
            os.kill(os.getpid(), signal.SIGKILL)

    def module(self):
        if PLACE == "module" and os.environ.get("ROUNDELAY_LEARNER") == LEARNER:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().module()

    def evaluate(self, module, split, part=0, parts=1):
        if split == "test" and EVALUATION_S:
            (FOLDER / "evaluating").touch()
            time.sleep(EVALUATION_S)
        return super().evaluate(module, split, part, parts)

    def loss(self, module, batch):
        if not (FOLDER / "hurry").exists():
            time.sleep(STEP_S)
        return super().loss(module, batch)
