"""What a learner saves: its part of every checkpoint, and, at the end of the run, the result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.elastic import ElasticGroup
from roundelay.learner import Learner
from roundelay.training.checkpoint import Checkpoints, complete
from roundelay.training.config import Config
from roundelay.training.evaluator import SPLITS, Evaluator, mean_model
from roundelay.training.metrics import Meter
from roundelay.training.partition import Position
from roundelay.training.run_result import write_result
from roundelay.training.state import learner_state
from roundelay.training.step import TrainingStep
from roundelay.training.task import Task
from roundelay.weights.serialization import read_state

LOOK_FOR_CHECKPOINTS_S = 1.0  # how often one asynchronous learner looks for a new complete checkpoint


class Saver:
    """Saves the checkpoints of one learner, has them evaluated, and writes the result of the run.

    Args:
        config: of the run.
        folder: of the run.
        task: of the run.
        step: counts the samples of the learner.
        meter: tells the seconds of the run, and writes the rows of evaluations.
    """

    def __init__(self, config: Config, folder: Path, task: Task, step: TrainingStep, meter: Meter) -> None:
        self._config, self._folder, self._task, self._step, self._meter = config, folder, task, step, meter
        self.checkpoints = Checkpoints(folder / "checkpoints", step.learner, config.checkpoint.keep)
        self.evaluator = Evaluator(task, meter.write, self.checkpoints.mark_best)
        self._looked_at = time.perf_counter()

    def at_boundary(self, learner: Learner, position: Position, number: int) -> None:
        """Save at chunk `number`. In lockstep, also evaluate the mean model together with the other learners."""
        self._save(learner, position, number)
        if position.partition.lockstep:
            samples_seen = position.partition.chunks.samples_before(number)
            self.evaluator.evaluate_together(learner, "valid", samples_seen)

    def save_stop(self, learner: Learner, position: Position, client: RendezvousClient) -> None:
        """Save at a chunk number that is the same for all learners that stop."""
        if position.partition.lockstep:
            self._save(learner, position, position.done)
        else:
            last = max(position.used, default=-1) + 1
            self._save(learner, position, client.stop_boundary(default=last))

    def save_end(self, learner: Learner, position: Position) -> None:
        """Take no more steps, and save at the end of the budget."""
        if learner.strategy.synchronous:
            self._save(learner, position, position.partition.total)
            learner.finish()
        else:
            learner.finish()  # first, because the mean includes exchanges that are under way
            self._save(learner, position, position.partition.total)

    def _save(self, learner: Learner, position: Position, number: int) -> None:
        """Save this learner's part of the checkpoint at chunk `number`."""
        self._step.counts.elapsed_s = self._meter.elapsed_s
        state = learner_state(learner, position, self._step.counts)
        samples_seen = position.partition.chunks.samples_before(number)
        self.checkpoints.save(samples_seen, state, learner.membership.living)

    def evaluate_newest(self, device: torch.device) -> bool:
        """Look for a new complete checkpoint, and evaluate it.

        Returns False, without a look, if the last look was less than `LOOK_FOR_CHECKPOINTS_S` ago.
        """
        if time.perf_counter() - self._looked_at < LOOK_FOR_CHECKPOINTS_S:
            return False
        self.evaluator.evaluate_newest(self.checkpoints.folder, device)
        self._looked_at = time.perf_counter()
        return True

    def last_checkpoint(self) -> str:
        """A sentence that names the newest complete checkpoint."""
        self.checkpoints.wait()
        good = complete(self.checkpoints.folder)
        return f"the last good checkpoint is '{good[-1].folder}'" if good else "there is no checkpoint yet"

    def finish(self, group: ElasticGroup, learner: Learner, samples: int, device: torch.device) -> None:
        """Evaluate the mean model and write the result, after `samples` samples. All learners call this."""
        if learner.strategy.synchronous:
            self._finish_together(group, learner, samples)
        else:  # each learner waits only until it has saved; then one of them reads what all have saved
            self.checkpoints.wait()
            _first_living(group, lambda living: self._write_mean_of(living, samples, device))

    def _finish_together(self, group: ElasticGroup, learner: Learner, samples: int) -> None:
        figures = {split: self.evaluator.evaluate_together(learner, split, samples) for split in SPLITS}
        learners = learner.membership.size  # read before peers leave, which they do as soon as the result is written
        with learner.consensus() as mean:
            _first_living(group, lambda living: self._write(mean, figures, learners, samples))

    def _write_mean_of(self, learners: tuple[int, ...], samples: int, device: torch.device) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(max(threads, len(os.sched_getaffinity(0))))  # all others wait, so every core is free
        states = [read_state(self.checkpoints.path(samples, learner)) for learner in learners]
        mean = mean_model(self._task, states).to(device)
        figures = {split: self.evaluator.evaluate(mean, split, samples) for split in SPLITS}
        self._write(mean, figures, len(learners), samples)
        torch.set_num_threads(threads)

    def _write(self, mean: nn.Module, figures: dict[str, dict[str, float]], learners: int, samples: int) -> None:
        run = {"elapsed_s": self._meter.elapsed_s, "samples": samples, "learners": learners}
        write_result(self._folder, self._config, self._task, mean, run | figures)


def _first_living(group: ElasticGroup, write: Callable[[tuple[int, ...]], None]) -> None:
    """The first living learner calls `write`; all others wait. If it is lost before it is done, the next one writes.

    All learners must call this.
    """
    written = False
    while True:
        view = group.gather(written)
        if any(view.values.values()):
            return
        living = view.membership.living
        if group.id == living[0]:
            write(living)
            written = True
