"""One learner of a run: it takes steps with the living learners, saves at checkpoint boundaries, and ends the run."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path

import torch

from roundelay.cluster.endpoint import Endpoint
from roundelay.cluster.environment import World
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.elastic import ElasticGroup, Progress, TrainingState
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
from roundelay.training.partition import Partition
from roundelay.training.saving import Saver
from roundelay.training.slowdown import Slowdown
from roundelay.training.state import Resumed, restore, restore_weights, resumed_from
from roundelay.training.step import TrainingStep
from roundelay.training.stopping import StopRequest
from roundelay.training.task import Batch, Task

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
    ) -> None:
        self.config, self.folder, self.task, self.world = config, folder, task, world
        self.client, self._elastic = client, elastic
        self.module = task.module().to(world.device)
        check_judged_by(task, self.module)
        self.optimizer = optimizer_of(config.optimizer, task.parameter_groups(self.module))
        members = config.group_size or world.local_size
        state = TrainingState(self.module, self.optimizer)
        self.group = ElasticGroup(client, endpoint, state, group_size=members)
        self.id = self.group.id
        strategy = strategy_of(config, world.local_size)  # only to read its properties: each connection has a new one
        self._synchronous, self._reforms_alone = strategy.synchronous, strategy.reforms_alone
        self.partition = self._partition()
        schedule = schedule_of(config, len(task), self.partition.samples)
        self.step = TrainingStep(
            self.id, task, self.module, self.optimizer, schedule=schedule, clip=config.optimizer.clip
        )
        self.meter = Meter(_sinks(config, folder, world, self.id), config.metrics.every_s)
        self.saver = Saver(config, folder, task, self.id, self.meter)
        self._slowdown = Slowdown(config.slowness().get(self.id, 1.0), client.check)
        path = folder / f"chunks-{self.id}.txt"
        self._audit = Audit(self.module, self.optimizer, path) if config.metrics.audit else None
        self._stop: StopRequest | None = None
        self._stopping = False

    def run(self, checkpoint: Checkpoint | None = None, *, joins: bool = False, guest: bool = False) -> bool:
        """Train until the budget is used up or a signal asks to stop; True if the budget is used up.

        Args:
            checkpoint: to resume from.
            joins: the other learners are under way, and this learner takes its weights from them.
            guest: the learner did not begin the run. If a signal asks it to stop, it leaves, and the run goes on.

        Raises DivergedError if the gradients of this learner stay non-finite.
        """
        torch.manual_seed(learner_seed(self.config, self.id))
        resumed = resumed_from(checkpoint, self.world.rank, self.world.size, self.partition)
        self._begin(resumed, ready=not joins)
        self.client.on_stop, self._guest = self._asked_to_stop, guest
        dropped = False
        while True:
            try:
                if dropped:
                    self._join_again()
                    dropped = False
                if not self._reforms_alone or not (self._taken_part or self.client.joining):
                    self._meet()
                finished = self._take_part()
                break
            except DivergedError as error:
                raise DivergedError(f"{error}; {self.saver.last_checkpoint()}") from None
            except LeftError as error:
                log.warning("learner %d leaves the run: %s", self.id, error)
                finished = False
                break
            except DroppedError as error:
                log.warning("learner %d was dropped (%s) and joins again", self.id, error)
                dropped = True
            except (PeerLostError, MembershipChangedError) as error:
                if (self._reforms_alone and self._taken_part) or not self._elastic:
                    raise
                log.warning("learner %d meets the others: %s", self.id, error)
            self.optimizer.zero_grad()
        self.saver.checkpoints.close()
        self.meter.close()
        if self._audit:
            self._audit.close()
        return finished

    def _begin(self, resumed: Resumed, *, ready: bool) -> None:
        self._ready = ready  # whether the weights belong to this run
        self._taken_part = False
        self.position, self.step.counts = resumed.position, resumed.counts
        self._weight_steps = self.position.steps  # steps that the weights have seen
        self._agreed: Progress | None = None  # by the last meeting, until this learner has the state to go on with
        self._saved = resumed.state  # until it is restored
        self._draws_used = 0  # since this learner registered
        self._used_before = resumed.used
        self._elapsed_before_s = resumed.counts.elapsed_s if ready else self.client.elapsed_s
        self.saver.evaluator.newest = self.position.skip_boundaries(len(resumed.used) if ready else self.client.given)

    # Following the membership ---------------------------------------------------------------------------------------------

    def _take_part(self) -> bool:
        """Train with the learners of this view; True if the budget is used up, False if a stop was requested.

        Raises an error if this learner is dropped, or if the membership changes so that learners must meet.
        """
        strategy = strategy_of(self.config, self.world.local_size)
        transport = self.group.connect(strategy, ready=self._ready)
        joined, self._ready = not self._ready, True
        if self._agreed is not None:
            self._weight_steps, self._agreed = self._agreed.weight_steps, None
        membership = self.group.view.membership
        with Learner(self.module, self.optimizer, strategy, transport, membership) as self.learner, self._audited():
            self.learner.count_from(self._weight_steps)
            if self._saved is not None:
                restore(self.learner, self._saved)
                self._saved = None
                if self.world.rank == 0:
                    self.meter.write({"kind": "event", "event": "resumed", "samples_seen": self.saver.evaluator.newest})
            if not self._taken_part:
                self._taken_part = True
                self.meter.start_clock(self._elapsed_before_s)
            self.group.follow(self.learner)
            draws = self.position.draws(self.client, self._used_before, lambda: self._draws_used, joined=joined)
            finished = self._train(draws)
            if not finished and self._leaves_alone():
                raise LeftError("it was asked to")
            self._finish() if finished else self._save_stop()
        return finished

    def _audited(self) -> contextlib.AbstractContextManager[None]:
        return self._audit.watching(self.optimizer) if self._audit else contextlib.nullcontext()

    def _join_again(self) -> None:
        """Register again after the other learners went on without this one. It takes its weights from them."""
        self.group.rejoin()
        self._ready = False
        self._draws_used, self.position.used = 0, []
        self._update_partition()
        self.saver.evaluator.newest = self.position.skip_boundaries(self.client.given)

    def _meet(self) -> None:
        """Meet the other learners: at the beginning, and, if synchronous, after every change of the membership.

        They go on from the first chunk that is not known to be used by all. In lockstep each learner must find the same
        chunks, boundaries and learning rate. So all of them, also those that have just joined, take the position of the
        meeting.
        """
        position = self.position
        first = position.first_unconfirmed if self._taken_part else position.done
        if self._saved is not None:  # a learner that joins now takes them
            restore_weights(self.module, self.optimizer, self._saved)
        before = self.group.view.membership.living
        self._agreed = self.group.meet(Progress(self._ready, first, self._weight_steps))
        if self.group.view.membership.living != before:
            self._saved = None  # what the strategy has saved was for other members
        self._update_partition()
        if self.partition.lockstep:
            self.position.restart_at(self._agreed.first_unconfirmed)

    def _update_partition(self) -> None:
        living = self.group.view.membership
        self.world = replace(self.world, rank=living.position(self.id), size=living.size)
        self.partition = self.position.partition = self._partition()

    def _partition(self) -> Partition:
        return Partition.of(self.config, self.world, len(self.task), self.id, synchronous=self._synchronous)

    def _asked_to_stop(self, reason: str) -> None:
        log.warning("learner %d stops: %s", self.id, reason)
        self._stopping = True
        if self._stop is not None:
            self._stop.request()

    def _leaves_alone(self) -> bool:
        """Whether this learner was asked to stop, and the run was not."""
        return self._guest and not self._stopping

    def _last_step(self, begun: int) -> int:
        together = self._synchronous or self.partition.members > 1
        return self.client.last_step(begun) if together and not self._leaves_alone() else begun

    def _check_membership(self) -> None:
        """Raise DroppedError if the run goes on without this learner, LeftError if it has joined a run that has ended."""
        self.client.check()
        if self._guest and self.learner.membership.size == 1 and not self.client.connected:
            raise LeftError("the rendezvous and all other learners are gone")

    # Steps ----------------------------------------------------------------------------------------------------------------

    def _train(self, draws: Draws) -> bool:
        """Take steps until the budget is used up (True) or a stop is requested (False)."""
        asked = self._stopping or (self._stop is not None and self._stop.requested)
        stop = self._stop = StopRequest(self._last_step)
        stop.listen()
        if asked:
            stop.request()
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
                if self._synchronous or not draws.more():  # a lost learner may leave draws that it did not use
                    return True

    def _step(self, draw: Draw, samples: int, batch: Batch) -> None:
        self.step.gradient(batch, self.position.samples_before_step(draw))
        self._slowdown.pause(self.learner.waited_s)
        self.step.guard(reduced=self.learner.strategy.reduces_gradients)
        self.optimizer.step()
        self._weight_steps += 1
        self._draws_used += 1
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
        self.meter.write(row | self.learner.metrics() | self.meter.window() | audited)

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
        if self._synchronous:
            self._save(self.partition.total)
            self.learner.finish()
        else:
            self.learner.finish()  # first, because the mean includes exchanges that are under way
            self._save(self.partition.total)
        self._write_row(finished=True)
        if self._synchronous:
            self.saver.finish_together(self.group, self.learner, self.partition.samples)
        else:
            self.saver.finish_alone(self.group, self.partition.samples, self.world.device)


def _sinks(config: Config, folder: Path, world: World, learner: int) -> list[Sink]:
    """Where the rows of a learner go: a file that the learners of one machine share, and TensorBoard if configured."""
    one_machine = world.local_size == world.size
    name = run_directory.METRICS if one_machine else f"metrics-{world.rank // world.local_size}.jsonl"
    sinks: list[Sink] = [JsonLines(folder / name)]
    if config.metrics.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard" / f"learner-{learner}"))
    return sinks
