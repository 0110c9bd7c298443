"""The learning rate as a function of the samples that all learners together have used."""

from __future__ import annotations

import math

from roundelay.training.config import OptimizerConfig, ScheduleConfig


class Schedule:
    r"""Scaling with the batch of all learners, linear warm-up, then constant, a factor per epoch, or cosine.

    $$\alpha(s) = \alpha_0 \, (1 + (c - 1) \min(1, s/w)) \, d(s), \quad
      c = B/B_0 \text{ with SGD}, \quad c = \sqrt{n B/B_0} \text{ with Adam}$$

    with s samples used by all learners, the batch B of all learners, the reference batch $B_0$, n different gradients in a step,
    w samples of warm-up, and the decay d. Adam divides by the noise of a gradient: that of a mean over B samples falls with
    $\sqrt B$ (arXiv:2205.10287), and is $\sqrt n$ times larger if n optimizers see B/n samples each.

    Args:
        optimizer: gives $\alpha_0$.
        schedule: gives scaling, warm-up and decay.
        batch: samples per step of all learners.
        gradients: n; 1 if gradients are averaged over all learners.
        epoch: samples in an epoch.
        total: samples in the run.

    >>> papers = ScheduleConfig(reference_batch=256, warmup_epochs=10, shape="factor", decay_after_epochs=10)
    >>> schedule = Schedule(OptimizerConfig(lr=0.1), papers, batch=2560, epoch=1000, total=16000)
    >>> [round(schedule.at(1000 * epoch), 3) for epoch in (0, 5, 10, 11, 12)]
    [0.1, 0.55, 0.707, 0.5, 0.354]
    """

    def __init__(
        self,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        *,
        batch: int,
        epoch: int,
        total: int,
        gradients: int = 1,
    ) -> None:
        self._lr, self._config = optimizer.lr, schedule
        self._scale = 1.0
        if schedule.reference_batch:
            growth = batch / schedule.reference_batch
            self._scale = growth if optimizer.name == "sgd" else math.sqrt(gradients * growth)
        self._epoch, self._total = epoch, total

    def at(self, samples: int) -> float:
        """The learning rate of a step that begins when `samples` samples are used."""
        epochs = samples / self._epoch
        warmup = self._config.warmup_epochs
        warmed = min(1.0, epochs / warmup) if warmup else 1.0
        return self._lr * (1 + (self._scale - 1) * warmed) * self._decay(epochs, warmup)

    def _decay(self, epochs: float, warmup: float) -> float:
        if self._config.shape == "factor":
            return float(self._config.factor ** max(0, math.floor(epochs - self._config.decay_after_epochs + 1e-9) + 1))
        if self._config.shape == "cosine":
            total = self._total / self._epoch
            done = min(1.0, max(0.0, (epochs - warmup) / (total - warmup))) if total > warmup else 0.0
            return 0.5 * (1 + math.cos(math.pi * done))
        return 1.0
