"""The steps of one learner: batches in; metrics, checkpoints and the result out."""

from __future__ import annotations

import contextlib

from torch import nn
from torch.optim import Optimizer

from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.elastic import ElasticGroup
from roundelay.errors import RoundelayError
from roundelay.learner import Learner
from roundelay.training.audit import Audit
from roundelay.training.build import schedule_of
from roundelay.training.config import Config
from roundelay.training.data import Draw, batches
from roundelay.training.metrics import JsonLines, Meter, Sink, TensorBoard
from roundelay.training.other_machines import RunFiles
from roundelay.training.participation import Participation
from roundelay.training.saving import Saver
from roundelay.training.slowdown import Slowdown
from roundelay.training.step import TrainingStep
from roundelay.training.stopping import Stopping, StopRequest
from roundelay.training.task import Batch, Task


class LeftError(RoundelayError):
    """This learner has joined a run, and leaves it before its end."""


class TrainingLoop:
    """Takes the steps of one learner, and writes what the run leaves. It stays when the membership changes.

    Args:
        config: of the run.
        files: where the files of the run are.
        task: of the run.
        module: what is trained.
        optimizer: of the module.
        part: the learner's place in the run.
        group: the learners that train together.
        client: the learner's connection to the rendezvous.

    Attributes:
        step: one step without its communication.
        meter: writes the metrics.
        saver: saves checkpoints and the result.
        stopping: whether the learner was asked to stop.
    """

    def __init__(
        self,
        config: Config,
        files: RunFiles,
        task: Task,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        part: Participation,
        group: ElasticGroup,
        client: RendezvousClient,
    ) -> None:
        self._task, self._module, self._optimizer = task, module, optimizer
        self._part, self._group, self._client, self._workers = part, group, client, config.data.workers
        self.stopping = Stopping(client)
        schedule = schedule_of(config, len(task), part.partition.samples, part.strategy)
        self.step = TrainingStep(group.id, task, module, optimizer, schedule=schedule, clip=config.optimizer.clip)
        self.meter = Meter(_sinks(config, files, group.id), config.metrics.every_s)
        self.saver = Saver(config, files, task, self.step, self.meter)
        self._slowdown = Slowdown(config.slowness().get(group.id, 1.0), client.check)
        path = files.folder / f"chunks-{group.id}.txt"
        self._audit = Audit(module, optimizer, path) if config.metrics.audit else None

    def run(self, learner: Learner) -> bool:
        """Train with the learners of this view; True if the budget is used up, False if a stop was requested.

        Raises LeftError if this learner leaves the run alone, and other errors if it is dropped or must meet the others.
        """
        with self._audit.watching(self._optimizer) if self._audit else contextlib.nullcontext():
            stop = self.stopping.request(together=self._part.synchronous or self._part.partition.members > 1)
            self._module.train()
            with contextlib.closing(stop):
                finished = self._take_steps(learner, stop)
            if not finished and self.stopping.leaves_alone:
                raise LeftError("it was asked to")
            self._finish(learner) if finished else self.saver.save_stop(learner, self._part.position, self._client)
        return finished

    def close(self) -> None:
        """Wait for the files that are being written, and close them."""
        self.saver.close()
        self.meter.close()
        if self._audit:
            self._audit.close()

    def _take_steps(self, learner: Learner, stop: StopRequest) -> bool:
        """Take steps until the budget is used up (True) or a stop is requested (False)."""
        part, draws = self._part.partition, self._part.draws()
        while True:
            self._slowdown.begin(learner.waited_s)
            for draw, samples, batch in batches(
                self._task, part.chunks, draws, member=part.member, members=part.members, workers=self._workers
            ):
                self._check_membership(learner)
                if not stop.begin_step():
                    return False
                self._step(learner, draw, samples, self._task.to_device(batch, self._part.world.device))
            if stop.requested:
                return False
            if self._part.synchronous or not draws.more():  # a lost learner may leave draws that it did not use
                return True

    def _check_membership(self, learner: Learner) -> None:
        """Raise DroppedError if the run goes on without this learner, LeftError if it has joined a run that has ended."""
        self._client.check()
        if self.stopping.guest and learner.membership.size == 1 and not self._client.connected:
            raise LeftError("the rendezvous and all other learners are gone")

    def _step(self, learner: Learner, draw: Draw, samples: int, batch: Batch) -> None:
        part = self._part
        self.step.gradient(batch, part.position.samples_before_step(draw))
        self._slowdown.pause(learner.waited_s)
        self.step.guard(reduced=learner.strategy.reduces_gradients)
        self._optimizer.step()
        part.stepped()
        if self._audit:
            self._audit.used(draw.chunk)
        boundary = self.step.count(draw, samples, part.position, self.meter)
        if self.meter.due():
            self._write_row(learner)
        self._slowdown.end(learner.waited_s)
        if boundary is not None:
            self.saver.at_boundary(learner, part.position, boundary)
            self._slowdown.begin(learner.waited_s)
        leads = self._group.id == min(self._group.view.membership.living)
        if not part.partition.lockstep and leads and self.saver.evaluate_newest(part.world.device):
            self._slowdown.begin(learner.waited_s)

    def _write_row(self, learner: Learner, *, finished: bool = False) -> None:
        audited = self._audit.figures(learner.strategy.weights()) if self._audit else {}
        row = self.step.row(self._part.position, finished=finished)
        window = self.meter.last_window() if finished else self.meter.window()
        self.meter.write(row | learner.metrics() | window | audited)

    def _finish(self, learner: Learner) -> None:
        """Save at the end of the budget; then write the result."""
        self.saver.save_end(learner, self._part.position)
        self._write_row(learner, finished=True)
        self.saver.finish(self._group, learner, self._part.partition.samples, self._part.world.device)


def _sinks(config: Config, files: RunFiles, learner: int) -> list[Sink]:
    """Where the rows of a learner go: a file that the learners of one machine share, and TensorBoard if configured."""
    sinks: list[Sink] = [JsonLines(files.folder / files.metrics)]
    if config.metrics.tensorboard:
        sinks.append(TensorBoard(files.folder / "tensorboard" / f"learner-{learner}"))
    return sinks
