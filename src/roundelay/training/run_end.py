"""The end of a run: learners find the mean model, evaluate it and write the result."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from roundelay.elastic import ElasticGroup
from roundelay.learner import Learner
from roundelay.training.checkpoint import Checkpoints
from roundelay.training.config import Config
from roundelay.training.evaluator import SPLITS, Evaluator, mean_model
from roundelay.training.metrics import Meter
from roundelay.training.run_result import write_result
from roundelay.training.task import Task
from roundelay.weights.serialization import read_state


class RunEnd:
    """What one learner does after its last step.

    Args:
        config: of the run.
        folder: of the run.
        task: of the run.
        evaluator: evaluates the mean model.
        samples: samples in the run.
    """

    def __init__(self, config: Config, folder: Path, task: Task, evaluator: Evaluator, samples: int) -> None:
        self._config, self._folder, self._task = config, folder, task
        self._evaluator, self._samples = evaluator, samples

    def together(self, learner: Learner, meter: Meter) -> None:
        """Evaluate the mean model and write the result. A collective of synchronous learners."""
        figures = {split: self._evaluator.evaluate_together(learner, split, self._samples) for split in SPLITS}
        with learner.consensus() as mean:
            if learner.transport.rank == learner.membership.living[0]:
                self._write(mean, figures, learner.membership.size, meter)

    def alone(self, group: ElasticGroup, checkpoints: Checkpoints, meter: Meter, device: torch.device) -> None:
        """Wait until all learners have saved; then the first living learner writes the result.

        If that learner is lost while it evaluates, the next one does the same.
        """
        checkpoints.wait()
        written = False
        while True:
            view = group.gather(written)
            if any(view.values.values()):
                return
            living = view.membership.living
            if group.id == living[0]:
                self._write_mean_of(checkpoints, living, meter, device)
                written = True

    def _write_mean_of(
        self, checkpoints: Checkpoints, learners: tuple[int, ...], meter: Meter, device: torch.device
    ) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(max(threads, len(os.sched_getaffinity(0))))  # all others wait, so every core is free
        states = [read_state(checkpoints.path(self._samples, learner)) for learner in learners]
        mean = mean_model(self._task, states).to(device)
        figures = {split: self._evaluator.evaluate(mean, split, self._samples) for split in SPLITS}
        self._write(mean, figures, len(learners), meter)
        torch.set_num_threads(threads)

    def _write(self, mean: nn.Module, figures: dict[str, dict[str, float]], learners: int, meter: Meter) -> None:
        run = {"elapsed_s": meter.elapsed_s, "samples": self._samples, "learners": learners}
        write_result(self._folder, self._config, self._task, mean, run | figures)
