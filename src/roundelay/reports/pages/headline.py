"""The sentence that a report begins with: how long each run took to the same loss, or how one run ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roundelay.reports.pages.formats import duration, figure
from roundelay.reports.pages.run import Run

MOST_NAMED = 6  # runs in the sentence; of more runs it has the first and the last to arrive


@dataclass(frozen=True)
class SameLoss:
    """The lowest validation loss that all runs have reached, and the seconds that each run needed for it.

    A run that has it at its `first` evaluation already may have reached it earlier.
    """

    loss: float
    seconds: tuple[float, ...]
    first: tuple[bool, ...]

    def told(self, index: int) -> str:
        """The time of a run in words."""
        return "at most " * self.first[index] + duration(self.seconds[index])


def same_loss(runs: Sequence[Run]) -> SameLoss | None:
    """What the runs have in common; None if there is nothing to compare.

    A run has reached a loss at the first evaluation of its mean model that is not above it. Losses of different tasks are
    not comparable, and the run that is last to reach the loss must have come there by training: not at its first evaluation.
    """
    tasks = {str(run.config.get("task")) for run in runs}
    curves = [run.evaluations.get("valid") for run in runs]
    if len(runs) < 2 or len(tasks) > 1 or any(curve is None or "loss" not in curve for curve in curves):
        return None
    losses = [curve["loss"] for curve in curves if curve is not None]
    lowest = [float(np.nanmin(values)) for values in losses]
    target = max(lowest)
    reached = [int(np.argmax(values <= target)) for values in losses]
    if reached[lowest.index(target)] == 0:
        return None
    times = (curve["elapsed_s"][first] for curve, first in zip(curves, reached, strict=True) if curve is not None)
    return SameLoss(target, tuple(map(float, times)), tuple(first == 0 for first in reached))


def headline(runs: Sequence[Run]) -> str:
    """One sentence about these runs."""
    if len(runs) == 1:
        return _ending(runs[0])
    common = same_loss(runs)
    if common is None:
        return ""
    named = list(range(len(runs)))
    if len(named) > MOST_NAMED:
        named = [max(named, key=common.seconds.__getitem__), min(named, key=common.seconds.__getitem__)]
    times = ", ".join(f"{runs[index].name} {common.told(index)}" for index in named)
    which = "" if len(runs) <= MOST_NAMED else f"Of {len(runs)} runs, the slowest and the fastest: "
    return f"{which}{times} to the same validation loss ({figure(common.loss)})."


def _ending(run: Run) -> str:
    size = f"{run.size} learners" if run.size != 1 else "one learner"
    words = [str(run.config.get("task", "")).partition(":")[2], str(run.config.get("strategy", "")), size]
    state = run.state if not run.finished else f"finished in {duration(run.elapsed_s)}"
    return ", ".join(filter(None, words)) + f": {state}{_figures(run)}."


def _figures(run: Run) -> str:
    """The figures of the test split, with the word error rate first; else of the validation split."""
    for split in ("test", "valid"):
        rates = [f"WER {100 * run.words[split]['wer']:.2f} %"] if split in run.words else []
        found = rates + [f"{name} {figure(run.figure(split, name))}" for name in run.figures if run.known(split, name)]
        if found:
            return f"; {split}: {', '.join(found)}"
    return ""
