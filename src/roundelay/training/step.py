"""One learner's training step without its communication. The trainer and the virtual clock both use this class."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.errors import DivergedError
from roundelay.training.data import Draw
from roundelay.training.metrics import Meter, Row
from roundelay.training.partition import Position
from roundelay.training.schedule import Schedule
from roundelay.training.task import Batch, Task

log = logging.getLogger("roundelay")

DIVERGED_AFTER = 10  # steps in a row without a finite gradient


@dataclass
class Counts:
    """What one learner counts through the whole run, resumed parts included: samples, skipped steps, seconds."""

    samples: int = 0
    skipped: int = 0
    elapsed_s: float = 0.0


class TrainingStep:
    """Sets the learning rate, computes the gradient, guards against non-finite numbers, and counts.

    A step is `gradient`, `guard`, then the optimizer's step, then `count`. Between these calls the learner exchanges with
    others. A `Learner` exchanges in hooks, and blocks while it waits. On the virtual clock a learner is a generator
    and yields instead.

    Args:
        learner: the number of the learner, for messages.
        task: gives the loss.
        module: the model.
        optimizer: of the model.
        schedule: gives the learning rate.
        clip: the largest norm of a gradient; 0: no limit.
    """

    def __init__(
        self, learner: int, task: Task, module: nn.Module, optimizer: Optimizer, *, schedule: Schedule, clip: float
    ) -> None:
        self.learner, self._task, self._module, self._optimizer = learner, task, module, optimizer
        self._schedule, self._clip = schedule, clip
        self.counts = Counts()
        self._loss = math.nan
        self._skipped_in_a_row = 0

    def gradient(self, batch: Batch, samples_seen: int) -> None:
        """Set the learning rate for `samples_seen` samples, and compute the gradient of the loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = group.get("lr_scale", 1.0) * self._schedule.at(samples_seen)
        self._optimizer.zero_grad()
        loss = self._task.loss(self._module, batch)
        loss.backward()
        self._loss = float(loss.detach())

    def guard(self, *, reduced: bool) -> None:
        """Clip the gradient. If it is not finite, remove it, so that the optimizer's step changes nothing.

        The norm is computed from float32 squares. If it is finite, no gradient is above 2e19, so weights stay finite.

        Args:
            reduced: the gradient is the mean over learners. Then all learners see the same norm, and either all take the
                step or all skip it. The loss differs between learners, so it is not checked.

        Raises DivergedError after `DIVERGED_AFTER` skipped steps in a row.
        """
        norm = torch.nn.utils.get_total_norm([w.grad for w in self._module.parameters() if w.grad is not None])
        if math.isfinite(float(norm)) and (reduced or math.isfinite(self._loss)):
            self._skipped_in_a_row = 0
            if self._clip:
                torch.nn.utils.clip_grads_with_norm_(self._module.parameters(), self._clip, norm)
            return
        self._skip(norm)

    def _skip(self, norm: Tensor) -> None:
        for weight in self._module.parameters():
            weight.grad = None
        self.counts.skipped += 1
        self._skipped_in_a_row += 1
        log.warning("learner %d skips a step: its loss is %g, its gradient %g", self.learner, self._loss, norm)
        if self._skipped_in_a_row >= DIVERGED_AFTER:
            raise DivergedError(
                f"learner {self.learner} had no finite gradient in {DIVERGED_AFTER} steps; a lower optimizer.lr, a longer "
                "schedule.warmup_epochs or optimizer.clip may help"
            )

    def count(self, draw: Draw, samples: int, position: Position, meter: Meter) -> int | None:
        """Count a finished step. If it passed a checkpoint boundary, return the chunk number of the checkpoint."""
        self.counts.samples += samples
        meter.add(self._loss, samples)
        return position.advance(draw)

    def row(self, position: Position, *, finished: bool = False) -> Row:
        """The row of this learner for the metrics, without the figures of its `Learner`."""
        total = position.partition.samples
        return {
            "kind": "learner",
            "learner": self.learner,
            "samples_seen": total if finished else position.samples_seen,
            "total": total,
            "samples": self.counts.samples,
            "skipped": self.counts.skipped,
            "lr": self._optimizer.param_groups[0]["lr"],
        }
