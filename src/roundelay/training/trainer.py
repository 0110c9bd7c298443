"""One learner of a run: it takes steps with the living learners, saves at checkpoint boundaries, and ends the run."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import torch

from roundelay.cluster.endpoint import Endpoint
from roundelay.cluster.environment import World
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.elastic import ElasticGroup
from roundelay.errors import DivergedError, DroppedError, MembershipChangedError, PeerLostError, RoundelayError
from roundelay.learner import Learner
from roundelay.training import run_directory
from roundelay.training.audit import Audit
from roundelay.training.build import learner_seed, optimizer_of, schedule_of, strategy_of
from roundelay.training.checkpoint import Checkpoint
from roundelay.training.config import Config
from roundelay.training.data import Draw, Draws, batches
from roundelay.training.evaluator import check_judged_by
from roundelay.training.metrics import JsonLines, Meter, Sink, TensorBoard
from roundelay.training.other_machines import OtherMachines
from roundelay.training.participation import Participation
from roundelay.training.partition import Partition, Position
from roundelay.training.saving import Saver
from roundelay.training.slowdown import Slowdown
from roundelay.training.state import Resumed, restore, restore_weights, resumed_from
from roundelay.training.step import TrainingStep
from roundelay.training.stopping import Stopping
from roundelay.training.task import Batch, Task
from roundelay.training_state import TrainingState

log = logging.getLogger("roundelay")


class LeftError(RoundelayError):
    """This learner has joined a run, and leaves it before its end."""


class Trainer:
    """One learner of a run.

    Args:
        config: of the run.
        folder: of the run.
        task: of the run. Build it before the learner registers: building may take long, and other learners wait for a
            learner that has registered.
        world: rank and size at the beginning.
        client: a connection to the rendezvous, where this learner has registered.
        endpoint: connects this learner to the others.
        elastic: whether synchronous learners go on when the membership changes; if not, `run` raises the error.
        metrics: the name of the file of metrics in `folder`, which learners of this machine share.
        others: the directories of other machines; None if all machines see `folder`.

    Raises ConfigError if the task is judged by a figure that it does not have.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        task: Task,
        world: World,
        *,
        client: RendezvousClient,
        endpoint: Endpoint,
        elastic: bool = True,
        metrics: str = run_directory.METRICS,
        others: OtherMachines | None = None,
    ) -> None:
        self.config, self.folder, self.task = config, folder, task
        self.client, self._elastic = client, elastic
        self.module = task.module().to(world.device)
        check_judged_by(task, self.module)
        self.optimizer = optimizer_of(config.optimizer, task.parameter_groups(self.module))
        members = config.group_size or world.local_size
        state = TrainingState(self.module, self.optimizer)
        self.group = ElasticGroup(client, endpoint, state, group_size=members)
        self.id = self.group.id
        self.stopping = Stopping(client)
        self.group.on_link, self.group.stopping = self._link_changed, lambda: self.stopping.asked
        self._part = Participation(config, len(task), world, client, self.group)
        schedule = schedule_of(config, len(task), self.partition.samples)
        self.step = TrainingStep(
            self.id, task, self.module, self.optimizer, schedule=schedule, clip=config.optimizer.clip
        )
        self.meter = Meter(_sinks(config, folder / metrics, self.id), config.metrics.every_s)
        self.saver = Saver(config, folder, task, self.id, self.meter, others=others)
        self._slowdown = Slowdown(config.slowness().get(self.id, 1.0), client.check)
        path = folder / f"chunks-{self.id}.txt"
        self._audit = Audit(self.module, self.optimizer, path) if config.metrics.audit else None

    @property
    def world(self) -> World:
        """Rank and size at the moment."""
        return self._part.world

    @property
    def partition(self) -> Partition:
        """This learner's part of the run at the moment."""
        return self._part.partition

    @property
    def position(self) -> Position:
        """How far this learner is."""
        return self._part.position

    def run(self, checkpoint: Checkpoint | None = None, *, joins: bool = False, guest: bool = False) -> bool:
        """Train until the budget is used up or a signal asks to stop; True if the budget is used up.

        Args:
            checkpoint: to resume from.
            joins: the other learners are under way, and this learner takes its weights from them.
            guest: the learner did not begin the run. If a signal asks it to stop, it leaves, and the run goes on.

        Raises DivergedError if the gradients of this learner stay non-finite.
        """
        torch.manual_seed(learner_seed(self.config, self.id))
        self.stopping.guest = guest
        self._begin(resumed_from(checkpoint, self.world.rank, self.world.size, self.partition), ready=not joins)
        try:
            finished = self._train_with_the_living()
        except DivergedError as error:
            raise DivergedError(f"{error}; {self.saver.last_checkpoint()}") from None
        except LeftError as error:
            log.warning("learner %d leaves the run: %s", self.id, error)
            finished = False
        self.saver.close()
        self.meter.close()
        if self._audit:
            self._audit.close()
        return finished

    def _begin(self, resumed: Resumed, *, ready: bool) -> None:
        if resumed.state is not None:  # a learner that joins before the first step needs these weights, too
            restore_weights(self.module, self.optimizer, resumed.state)
        self.saver.evaluator.newest = self._part.begin(resumed, ready=ready)
        self.step.counts = resumed.counts
        self._elapsed_before_s = resumed.counts.elapsed_s if ready else self.client.elapsed_s

    # Following the membership ---------------------------------------------------------------------------------------------

    def _train_with_the_living(self) -> bool:
        """Take part until the end, whatever happens to other learners; True if the budget is used up."""
        dropped = False
        while True:
            try:
                if dropped:
                    self.saver.evaluator.newest = self._part.join_again()
                    dropped = False
                if self._part.must_meet:
                    self._part.meet()
                return self._take_part()
            except DroppedError as error:
                log.warning("learner %d was dropped (%s) and joins again", self.id, error)
                dropped = True
            except (PeerLostError, MembershipChangedError) as error:
                if (self._part.reforms_alone and self._part.began) or not self._elastic:
                    raise
                log.warning("learner %d meets the others: %s", self.id, error)
            self.optimizer.zero_grad()

    def _take_part(self) -> bool:
        """Train with the learners of this view; True if the budget is used up, False if a stop was requested.

        Raises an error if this learner is dropped, or if the membership changes so that learners must meet.
        """
        strategy = strategy_of(self.config, self.world.local_size)
        transport, steps, saved = self._part.connect(strategy)
        membership = self.group.view.membership
        with Learner(self.module, self.optimizer, strategy, transport, membership) as self.learner, self._audited():
            self.learner.count_from(steps)
            if saved is not None:
                restore(self.learner, saved)
                if self.world.rank == 0:
                    self.meter.write({"kind": "event", "event": "resumed", "samples_seen": self.saver.evaluator.newest})
            if not self._part.began:
                self._part.began = True
                self.meter.start_clock(self._elapsed_before_s)
            self.group.follow(self.learner)
            finished = self._train(self._part.draws())
            if not finished and self.stopping.leaves_alone:
                raise LeftError("it was asked to")
            self._finish() if finished else self._save_stop()
        return finished

    def _audited(self) -> contextlib.AbstractContextManager[None]:
        return self._audit.watching(self.optimizer) if self._audit else contextlib.nullcontext()

    def _link_changed(self, peer: int, reached: bool) -> None:  # noqa: FBT001
        event = "reachable" if reached else "unreachable"
        row = {"kind": "event", "event": event, "learner": peer, "reason": f"seen by learner {self.id}"}
        self.meter.write(row | {"samples_seen": self.position.samples_seen})

    def _check_membership(self) -> None:
        """Raise DroppedError if the run goes on without this learner, LeftError if it has joined a run that has ended."""
        self.client.check()
        if self.stopping.guest and self.learner.membership.size == 1 and not self.client.connected:
            raise LeftError("the rendezvous and all other learners are gone")

    # Steps ----------------------------------------------------------------------------------------------------------------

    def _train(self, draws: Draws) -> bool:
        """Take steps until the budget is used up (True) or a stop is requested (False)."""
        stop = self.stopping.request(together=self._part.synchronous or self.partition.members > 1)
        self.module.train()
        part, workers = self.partition, self.config.data.workers
        with contextlib.closing(stop):
            while True:
                self._slowdown.begin(self.learner.waited_s)
                for draw, samples, batch in batches(
                    self.task, part.chunks, draws, member=part.member, members=part.members, workers=workers
                ):
                    self._check_membership()
                    if not stop.begin_step():
                        return False
                    self._step(draw, samples, self.task.to_device(batch, self.world.device))
                if stop.requested:
                    return False
                if self._part.synchronous or not draws.more():  # a lost learner may leave draws that it did not use
                    return True

    def _step(self, draw: Draw, samples: int, batch: Batch) -> None:
        self.step.gradient(batch, self.position.samples_before_step(draw))
        self._slowdown.pause(self.learner.waited_s)
        self.step.guard(reduced=self.learner.strategy.reduces_gradients)
        self.optimizer.step()
        self._part.stepped()
        if self._audit:
            self._audit.used(draw.chunk)
        boundary = self.step.count(draw, samples, self.position, self.meter)
        if self.meter.due():
            self._write_row()
        self._slowdown.end(self.learner.waited_s)
        if boundary is not None:
            self._at_boundary(boundary)
        leads = self.id == min(self.group.view.membership.living)
        if not self.partition.lockstep and leads and self.saver.evaluate_newest(self.world.device):
            self._slowdown.begin(self.learner.waited_s)

    def _write_row(self, *, finished: bool = False) -> None:
        audited = self._audit.figures(self.learner.strategy.weights()) if self._audit else {}
        row = self.step.row(self.position, finished=finished)
        window = self.meter.last_window() if finished else self.meter.window()
        self.meter.write(row | self.learner.metrics() | window | audited)

    # Checkpoints and the end of the run -------------------------------------------------------------------------------------

    def _at_boundary(self, number: int) -> None:
        self._save(number)
        if self.partition.lockstep:
            samples_seen = self.partition.chunks.samples_before(number)
            self.saver.evaluator.evaluate_together(self.learner, "valid", samples_seen)
        self._slowdown.begin(self.learner.waited_s)

    def _save(self, number: int) -> None:
        self.saver.save(self.learner, self.position, self.step.counts, number)

    def _save_stop(self) -> None:
        """Save at a chunk number that is the same for all learners that stop."""
        if self.partition.lockstep:
            self._save(self.position.done)
        else:
            self._save(self.client.stop_boundary(default=max(self.position.used, default=-1) + 1))

    def _finish(self) -> None:
        """Save at the end of the budget; then write the result."""
        if self._part.synchronous:
            self._save(self.partition.total)
            self.learner.finish()
        else:
            self.learner.finish()  # first, because the mean includes exchanges that are under way
            self._save(self.partition.total)
        self._write_row(finished=True)
        if self._part.synchronous:
            self.saver.finish_together(self.group, self.learner, self.partition.samples)
        else:
            self.saver.finish_alone(self.group, self.partition.samples, self.world.device)


def _sinks(config: Config, metrics: Path, learner: int) -> list[Sink]:
    """Where the rows of a learner go: a file that the learners of one machine share, and TensorBoard if configured."""
    sinks: list[Sink] = [JsonLines(metrics)]
    if config.metrics.tensorboard:
        sinks.append(TensorBoard(metrics.parent / "tensorboard" / f"learner-{learner}"))
    return sinks
