"""Judging a run: the mean model on held-out data, while it trains and at the end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from roundelay.cluster.environment import World
from roundelay.learner import Learner
from roundelay.training.checkpoint import Checkpoints, complete
from roundelay.training.metrics import Row
from roundelay.training.state import random_state, set_random_state
from roundelay.training.task import Task
from roundelay.weights import average
from roundelay.weights.serialization import read_state


class Evaluator:
    """Evaluates the mean model, writes a row about it, and remembers which checkpoint was best.

    Args:
        task: which says how.
        world: who this learner is.
        checkpoints: of the run.
        write: takes the row.
    """

    def __init__(self, task: Task, world: World, checkpoints: Checkpoints, write: Callable[[Row], None]) -> None:
        self._task, self.world, self._checkpoints, self._write = task, world, checkpoints, write
        self.newest = 0  # the samples_seen of the checkpoint that was evaluated last
        self._best = -math.inf

    def together(self, learner: Learner, split: str, samples_seen: int) -> dict[str, float]:
        """A collective: every learner evaluates its share of the split on the exact mean model."""
        with learner.consensus() as mean, evaluating(mean):
            sums = self._task.evaluate(mean, split, self.world.rank, self.world.size)
        totals = torch.tensor(list(sums.values()), dtype=torch.float64)
        learner.transport.all_reduce(totals, learner.membership.living).result()
        figures = dict(zip(sums, totals.tolist(), strict=True))
        return self._told(split, samples_seen, figures) if self.world.rank == 0 else _means(figures)

    def posted(self) -> None:
        """Alone: the mean of what all learners have posted at the newest mark, if that is new. Nobody waits."""
        posted = [each for each in complete(self._checkpoints.folder) if each.samples_seen > self.newest]
        if not posted:
            return
        self.newest = posted[-1].samples_seen
        self.alone(self._mean(posted[-1].path(learner) for learner in posted[-1].files), "valid", self.newest)

    def mean_of(self, samples_seen: int, learners: Iterable[int]) -> nn.Module:
        """The mean of what these learners have saved at `samples_seen`."""
        return self._mean(self._checkpoints.path(samples_seen, learner) for learner in learners)

    def _mean(self, paths: Iterable[Path]) -> nn.Module:
        states = [read_state(path) for path in paths]
        mean = self._task.module().to(self.world.device)
        mean.load_state_dict(average.mean_module([state["module"] for state in states if state["voice"]]))
        return mean

    def alone(self, mean: nn.Module, split: str, samples_seen: int) -> dict[str, float]:
        """One learner evaluates the whole split."""
        with evaluating(mean):
            sums = self._task.evaluate(mean, split)
        return self._told(split, samples_seen, sums)

    def _told(self, split: str, samples_seen: int, sums: dict[str, float]) -> dict[str, float]:
        figures = _means(sums)
        self._write(
            {"kind": "evaluation", "split": split, "samples_seen": samples_seen, "samples": sums["samples"]} | figures
        )
        if split == "valid":
            self._remember(samples_seen, figures)
        return figures

    def _remember(self, samples_seen: int, figures: dict[str, float]) -> None:
        name = self._task.judged_by.removeprefix("-")
        worth = -figures[name] if self._task.judged_by.startswith("-") else figures[name]
        if worth > self._best:
            self._best = worth
            self._checkpoints.mark_best(samples_seen)


def _means(sums: dict[str, float]) -> dict[str, float]:
    return {name: total / max(sums["samples"], 1.0) for name, total in sums.items() if name != "samples"}


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode, without gradients; random states are put back."""
    training, states = module.training, random_state()
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)
        set_random_state(states)
