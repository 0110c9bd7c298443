"""What a learner saves: its part of every checkpoint, and, at the end of the run, the result."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.elastic import ElasticGroup
from roundelay.learner import Learner
from roundelay.training import run_directory
from roundelay.training.checkpoint import Checkpoints, complete, write_whole
from roundelay.training.config import Config
from roundelay.training.evaluator import SPLITS, Evaluator, mean_model
from roundelay.training.metrics import Meter
from roundelay.training.other_machines import CheckpointCollector, RunFiles
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
        files: where the files of the run are.
        task: of the run.
        step: counts the samples of the learner.
        meter: tells the seconds of the run, and writes the rows of evaluations.
    """

    def __init__(self, config: Config, files: RunFiles, task: Task, step: TrainingStep, meter: Meter) -> None:
        self._config, self._folder, self._task, self._step, self._meter = config, files.folder, task, step, meter
        self.checkpoints = Checkpoints(files.folder / "checkpoints", step.learner, config.checkpoint.keep)
        self.evaluator = Evaluator(task, meter.write, self.checkpoints.mark_best)
        self._others = files.others
        self._collector = None if files.others is None else CheckpointCollector(self.checkpoints, files.others)
        self._looked_at = time.perf_counter()

    def close(self) -> None:
        """Wait for the last write, and end the threads."""
        if self._collector is not None:
            self._collector.close()
        self.checkpoints.close()

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
            self._save(learner, position, client.stop.boundary(default=last))

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
        if self._collector is not None:
            self._collector.saved(samples_seen, learner.membership.living)

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
            self._keep_results(_first_living(group, lambda living: self._write_mean_of(living, samples, device)))

    def _finish_together(self, group: ElasticGroup, learner: Learner, samples: int) -> None:
        figures = {split: self.evaluator.evaluate_together(learner, split, samples) for split in SPLITS}
        learners = learner.membership.size  # read before peers leave, which they do as soon as the result is written
        self.checkpoints.wait()
        with learner.consensus() as mean:

            def write(living: Sequence[int]) -> dict[str, Any]:
                self._collect(samples, living)
                return self._write(mean, figures, learners, samples)

            results = _first_living(group, write)
        self._keep_results(results)

    def _write_mean_of(self, living: Sequence[int], samples: int, device: torch.device) -> dict[str, Any]:
        learners = self._collect(samples, living)
        threads = torch.get_num_threads()
        torch.set_num_threads(max(threads, len(os.sched_getaffinity(0))))  # all others wait, so every core is free
        states = [read_state(self.checkpoints.path(samples, learner)) for learner in learners]
        mean = mean_model(self._task, states).to(device)
        figures = {split: self.evaluator.evaluate(mean, split, samples) for split in SPLITS}
        results = self._write(mean, figures, len(learners), samples)
        torch.set_num_threads(threads)
        return results

    def _collect(self, samples: int, learners: Sequence[int]) -> Sequence[int]:
        """Copy the last checkpoint of learners of other machines to this one. Returns the learners whose file is here."""
        if self._collector is None or self._others is None or not self._others.addresses():
            return learners
        found = self._collector.collect(samples, learners)
        self.checkpoints.complete(samples, found)
        return found

    def _write(
        self, mean: nn.Module, figures: dict[str, dict[str, float]], learners: int, samples: int
    ) -> dict[str, Any]:
        if self._others is not None:
            self._others.copy_metrics()
        run = {"elapsed_s": self._meter.elapsed_s, "samples": samples, "learners": learners}
        results = write_result(self._folder, self._config, self._task, mean, run | figures)
        return results | {run_directory.MODEL_PLACE: f"{platform.node()}:{self._folder.resolve()}"}

    def _keep_results(self, results: dict[str, Any]) -> None:
        """Write the results to a directory in which the first living learner did not write them."""
        path = self._folder / run_directory.RESULTS
        if not path.exists():
            write_whole(path, json.dumps(results, indent=2).encode())


def _first_living(group: ElasticGroup, write: Callable[[Sequence[int]], dict[str, Any]]) -> dict[str, Any]:
    """The first living learner calls `write`; all others wait. If it is lost before it is done, the next one writes.

    Returns, on all learners, what `write` has returned. All learners must call this.
    """
    written: dict[str, Any] | None = None
    while True:
        view = group.gather(written)
        if results := [value for value in view.values.values() if value is not None]:
            found: dict[str, Any] = results[0]
            return found
        living = view.membership.living
        if group.id == living[0]:
            written = write(living)
