"""Evaluating a run: the figures of the mean model on held-out data, during training and at its end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from roundelay.errors import CheckpointError, ConfigError, unknown
from roundelay.learner import Learner
from roundelay.training.checkpoint import MANIFEST, complete
from roundelay.training.metrics import Row
from roundelay.training.state import State, random_state, set_random_state
from roundelay.training.task import Task
from roundelay.weights import average
from roundelay.weights.serialization import read_state

SPLITS = ("valid", "test")
_TINY_PART = 10**9  # with so many parts, part 0 of a split is a single sample


class Evaluator:
    """Evaluates the mean model, writes a row about it, and reports which checkpoint is the best.

    Args:
        task: computes the figures.
        write: writes a row of the metrics.
        on_best: called with `samples_seen` of the best checkpoint so far.
    """

    def __init__(
        self, task: Task, write: Callable[[Row], None], on_best: Callable[[int], None] = lambda samples_seen: None
    ) -> None:
        self._task, self._write, self._on_best = task, write, on_best
        self.newest = 0  # samples_seen of the checkpoint that was evaluated last
        self._best = -math.inf

    def evaluate(self, mean: nn.Module, split: str, samples_seen: int) -> dict[str, float]:
        """Evaluate the mean model on a whole split."""
        with evaluating(mean):
            sums = self._task.evaluate(mean, split)
        return self._record(split, samples_seen, sums)

    def evaluate_together(self, learner: Learner, split: str, samples_seen: int) -> dict[str, float]:
        """Evaluate the exact mean model. This is a collective: all learners call it.

        Every learner evaluates the model on its part of the split.
        """
        members = learner.membership
        rank = members.position(learner.transport.rank)
        with learner.consensus() as mean, evaluating(mean):
            own = self._task.evaluate(mean, split, rank, members.size)
        totals = torch.tensor(list(own.values()), dtype=torch.float64)
        learner.transport.all_reduce(totals, members.living).result()
        sums = dict(zip(own, totals.tolist(), strict=True))
        return self._record(split, samples_seen, sums) if rank == 0 else means(sums)

    def evaluate_newest(self, checkpoints: Path, device: torch.device) -> None:
        """Evaluate the newest complete checkpoint on the validation data, unless it is evaluated already.

        Other learners do not wait.
        """
        new = [each for each in complete(checkpoints) if each.samples_seen > self.newest]
        if not new:
            return
        try:
            states = [read_state(new[-1].path(learner)) for learner in new[-1].files]
        except CheckpointError:
            if (new[-1].folder / MANIFEST).exists():
                raise
            return  # another learner has removed this checkpoint, because newer ones are complete
        self.newest = new[-1].samples_seen
        self.evaluate(mean_model(self._task, states).to(device), "valid", self.newest)

    def _record(self, split: str, samples_seen: int, sums: dict[str, float]) -> dict[str, float]:
        figures = means(sums)
        row: Row = {"kind": "evaluation", "split": split, "samples_seen": samples_seen, "samples": sums["samples"]}
        self._write(row | figures)
        if split == "valid":
            name = self._task.judged_by.removeprefix("-")
            quality = -figures[name] if self._task.judged_by.startswith("-") else figures[name]
            if quality > self._best:
                self._best = quality
                self._on_best(samples_seen)
        return figures


def mean_model(task: Task, states: Sequence[State]) -> nn.Module:
    """The mean of the modules of these learner states, in a new module."""
    module = task.module()
    counted = [state["module"] for state in states if state["consensus_weight"]]
    module.load_state_dict(average.mean_module(counted))
    return module


def means(sums: dict[str, float]) -> dict[str, float]:
    """The figures per sample, from the sums that `Task.evaluate` returns; NaN without samples, never 0.

    >>> means({"samples": 4.0, "loss": 2.0, "accuracy": 3.0})
    {'loss': 0.5, 'accuracy': 0.75}
    """
    samples = sums["samples"] or math.nan
    return {name: total / samples for name, total in sums.items() if name != "samples"}


def check_judged_by(task: Task, module: nn.Module) -> None:
    """Raise ConfigError unless `judged_by` is a figure that `evaluate` returns. Evaluates one sample."""
    with evaluating(module):
        sums = task.evaluate(module, "valid", 0, _TINY_PART)
    name, kind = task.judged_by.removeprefix("-"), type(task).__name__
    if "samples" not in sums:
        raise ConfigError(f"{kind}.evaluate must return the number of samples as 'samples', got {', '.join(sums)}")
    if name not in means(sums):
        raise ConfigError(f"{kind}.judged_by: " + unknown("figure of evaluate()", name, means(sums)))


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In this block the module is in evaluation mode, without gradients. Afterwards random states are as before."""
    training, states = module.training, random_state()
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)
        set_random_state(states)
