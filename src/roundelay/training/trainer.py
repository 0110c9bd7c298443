"""The training loop of one learner: batches in, steps, and marks at which it saves and the mean model is judged."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from roundelay.cluster.environment import World
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.elastic import Company, Endpoint, Progress
from roundelay.errors import DivergedError, DroppedError, MembershipChangedError, PeerLostError
from roundelay.learner import Learner
from roundelay.training.audit import Audit
from roundelay.training.build import optimizer_of, strategy_of
from roundelay.training.checkpoint import Checkpoint, Checkpoints, complete, write_whole
from roundelay.training.config import Config
from roundelay.training.data import Draw, Draws, batches
from roundelay.training.evaluator import Evaluator
from roundelay.training.metrics import JsonLines, Meter, Row, Sink, TensorBoard
from roundelay.training.partition import Partition, Position
from roundelay.training.recipes import as_table
from roundelay.training.schedule import Schedule
from roundelay.training.state import Carried, Earlier, State, earlier, set_random_state, state_of
from roundelay.training.stopping import StopRequest
from roundelay.training.task import Task
from roundelay.transport.heartbeats import BEAT_S

log = logging.getLogger("roundelay")

DIVERGED_AFTER = 10  # steps in a row without a finite gradient
SPLITS = ("valid", "test")
LOOK_FOR_POSTS_S = 1.0  # how often learner 0 looks whether all asynchronous learners have posted


class Trainer:
    """One learner of a run.

    Args:
        config: of the run.
        folder: of the run.
        task: of the run; to be made before the learner registers, for that may take long, and others count on it afterwards.
        world: who this learner is among those that begin.
        line: to the rendezvous, with which it has registered.
        door: to the others.
        elastic: whether synchronous learners can go on with others than those that they began with.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        task: Task,
        world: World,
        *,
        line: RendezvousClient,
        door: Endpoint,
        elastic: bool = True,
    ) -> None:
        self.config, self.folder, self.world, self.line, self._elastic = config, folder, world, line, elastic
        self.task = task
        self.module = self.task.module().to(world.device)
        self.optimizer = optimizer_of(config.optimizer, self.task.parameter_groups(self.module))
        members = config.group_size or world.local_size
        self.company = Company(config, line, door, Carried(self.module, self.optimizer), members=members)
        self.id = self.company.id
        self.plan = Partition.of(config, world, len(self.task), self.id)
        self._samples_in_run = self.plan.chunks.samples_before(self.plan.total)
        self.schedule = Schedule(
            config.optimizer,
            config.schedule,
            batch=config.data.batch * config.learners,
            epoch=len(self.task),
            total=self._samples_in_run,
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", self.id, config.checkpoint.keep)
        self.judge = Evaluator(self.task, world, self.checkpoints, self._write)
        self._slowness = config.slowness().get(self.id, 1.0)
        self._mark = self._skipped_in_a_row = 0
        self._loss = math.nan
        self._stop_class = StopRequest
        self._stop: StopRequest | None = None
        self._stopping = False
        self._audit: Audit | None = None

    def run(self, resumed: Checkpoint | None = None, *, joins: bool = False) -> bool:
        """Train until the budget is used up, or a signal asks to stop; True if it was used up.

        With `joins` the others are under way, and this learner takes its weights from them.
        """
        torch.manual_seed(self.config.seed * 1_000_003 + self.id)
        past = earlier(resumed, self.world.rank, self.world.size, self.plan)
        self._begin(past, ready=not joins)
        self.line.on_stop = self._asked_to_stop
        meets = joins and self.config.synchronous
        while True:
            try:
                if meets:
                    self._meet()
                finished = self._take_part(past.state if not self._taken_part else None)
                break
            except DroppedError as error:
                log.warning("learner %d was dropped (%s) and comes back", self.id, error)
                self._come_back()
            except (PeerLostError, MembershipChangedError) as error:
                if not (self._elastic and self.config.synchronous):
                    raise
                log.warning("learner %d meets the others: %s", self.id, error)
            meets = self.config.synchronous
            self.optimizer.zero_grad()
        self.checkpoints.close()
        self._meter.close()
        if self._audit:
            self._audit.close()
        return finished

    def _begin(self, past: Earlier, *, ready: bool) -> None:
        self._ready, self._taken_part = ready, False  # whether the weights are of this run
        self._start, self._steps, self._used = past.position.start, past.position.steps, list(past.position.used)
        self._taken = self._steps  # steps that the weights have seen
        self._done = 0  # draws used since this learner has registered
        self._used_before = past.used
        self._counts, self._earlier_s = past.counts, past.counts.elapsed_s if ready else self.line.elapsed_s
        self._begin_at(len(past.used) if ready else self.line.given)
        self._began = time.perf_counter()
        one_machine = self.world.local_size == self.world.size
        name = "metrics.jsonl" if one_machine else f"metrics-{self.world.rank // self.world.local_size}.jsonl"
        sinks: list[Sink] = [JsonLines(self.folder / name)]
        if self.config.metrics.tensorboard:
            sinks.append(TensorBoard(self.folder / "tensorboard" / f"learner-{self.id}"))
        self._meter = Meter(sinks, self.config.metrics.every_s)
        if self.config.metrics.audit:
            self._audit = Audit(self.module, self.optimizer, self.folder / f"chunks-{self.id}.txt")

    def _begin_at(self, number: int) -> None:
        """Marks before that chunk are others' business, or an earlier part's."""
        self._mark = number // self.plan.every
        self.judge.newest = self.plan.chunks.samples_before(number)

    # Who takes part -----------------------------------------------------------------------------------------------------------

    def _take_part(self, saved: State | None) -> bool:
        """Train with the learners of this term until the end, or until that cannot go on."""
        transport = self.company.enter(joins=not self._ready and not self.config.synchronous)
        joined, self._ready = not self._ready, True
        strategy = strategy_of(self.config, self.world)
        membership = self.company.term.membership
        with Learner(self.module, self.optimizer, strategy, transport, membership) as self.learner, self._audited():
            self.learner.count_from(self._taken)
            if saved is not None:
                self._restore(saved)
                if self.world.rank == 0:
                    self._write({"kind": "event", "event": "resumed", "samples_seen": self.judge.newest})
            if not self._taken_part:
                self._taken_part, self._began = True, time.perf_counter()
            self.company.follow(self.learner)
            position = Position(self._start, self._steps, tuple(self._used))
            draws = self.plan.draws(position, self._used_before, self.line, lambda: self._done, joined=joined)
            finished = self._train(draws)
            self._save_the_end() if finished else self._save_the_stop()
        return finished

    def _audited(self) -> contextlib.AbstractContextManager[None]:
        return self._audit.watching(self.optimizer) if self._audit else contextlib.nullcontext()

    def _come_back(self) -> None:
        """The others went on without this learner: it begins again, with their weights."""
        self.company.rejoin()
        self._ready = False
        self._done, self._used = 0, []
        self._find_place()
        self._begin_at(self.line.given)

    def _meet(self) -> None:
        """Synchronous learners begin a term: all bring how far they are, and go on from where all are."""
        begun = self._start + max(self._steps - 1, 0) * self.plan.groups
        start = self.company.meet(Progress(self._ready, begun, self._taken))
        self._taken = self.company.furthest()
        self._find_place()
        if self.plan.in_step:
            self._start, self._steps = start, 0

    def _find_place(self) -> None:
        living = self.company.term.membership
        self.world = replace(self.world, rank=living.position(self.id), size=living.size)
        self.judge.world = self.world
        self.plan = Partition.of(self.config, self.world, len(self.task), self.id)

    @property
    def _leads(self) -> bool:
        return self.id == min(self.company.term.membership.living)

    def _asked_to_stop(self, reason: str) -> None:
        log.warning("learner %d stops: %s", self.id, reason)
        self._stopping = True
        if self._stop is not None:
            self._stop.request()

    # A step ---------------------------------------------------------------------------------------------------------------

    def _train(self, draws: Draws) -> bool:
        together = self.config.synchronous or self.plan.members > 1
        asked = self._stopping or (self._stop is not None and self._stop.requested)
        stop = self._stop = self._stop_class(self.line.last_step if together else lambda begun: begun)
        stop.listen()
        if asked:
            stop.request()
        self.module.train()
        with contextlib.closing(stop):
            while True:
                for draw, samples, batch in self._batches(draws):
                    self.line.check()
                    if not stop.begin_step():
                        return False
                    self._step(draw, samples, self.task.to_device(batch, self.world.device))
                    self._after_step(draw)
                if stop.requested:
                    return False
                if self.config.synchronous or not draws.more():  # what somebody lost had not done
                    return True

    def _batches(self, draws: Draws) -> Iterator[tuple[Draw, int, Any]]:
        return batches(
            self.task,
            self.plan.chunks,
            draws,
            member=self.plan.member,
            members=self.plan.members,
            workers=self.config.data.workers,
        )

    def _step(self, draw: Draw, samples: int, batch: Any) -> None:  # noqa: ANN401
        began = time.perf_counter() - self.learner.waited_s
        number = self.plan.number_of_step(self._position()) if self.plan.in_step else draw.number
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("lr_scale", 1.0) * self.schedule.at(self.plan.chunks.samples_before(number))
        loss = self.task.loss(self.module, batch)
        loss.backward()
        if self._slowness > 1:
            self._dawdle((self._slowness - 1) * (time.perf_counter() - self.learner.waited_s - began))
        self._guard(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1
        self._taken += 1
        self._done += 1
        self._counts.samples += samples
        if not self.plan.in_step:
            self._used.append(draw.number)
        if self._audit:
            self._audit.used(draw.chunk)
        self._meter.add(self._loss, samples)

    def _dawdle(self, seconds: float) -> None:
        """Be slow; but not when the others have gone on without this learner."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, BEAT_S))
            self.line.check()

    def _guard(self, loss: Tensor) -> None:
        """Clip; without a finite gradient the step only mixes.

        The norm is of float32 squares, so where it is finite no gradient is above 2e19, and weights stay finite, too.
        Where gradients are reduced, all learners see the same norm, and take or skip the step together.
        """
        gradients = [weight.grad for weight in self.module.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._loss = float(loss.detach())
        finite = math.isfinite(float(norm))
        if finite and (self.learner.strategy.reduces_gradients or math.isfinite(self._loss)):
            self._skipped_in_a_row = 0
            if self.config.optimizer.clip:
                torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.config.optimizer.clip, norm)
            return
        for weight in self.module.parameters():
            weight.grad = None
        self._counts.skipped += 1
        self._skipped_in_a_row += 1
        log.warning("learner %d skips a step: its loss is %g, its gradient %g", self.id, self._loss, norm)
        if self._skipped_in_a_row >= DIVERGED_AFTER:
            raise DivergedError(
                f"learner {self.id} had no finite gradient in {DIVERGED_AFTER} steps; {self._last_good()}; "
                "a lower optimizer.lr, a longer schedule.warmup_epochs or optimizer.clip may help"
            )

    def _last_good(self) -> str:
        self.checkpoints.wait()
        good = complete(self.checkpoints.folder)
        return f"the last good checkpoint is '{good[-1].folder}'" if good else "there is no checkpoint yet"

    def _after_step(self, draw: Draw) -> None:
        done = self.plan.number_of_step(self._position()) if self.plan.in_step else draw.number + 1
        if self._meter.due():
            self._report(done)
        mark = done // self.plan.every
        # The last chunks may be fewer than learners: a mark that not all would reach is left to the end.
        if mark > self._mark and mark * self.plan.every < self.plan.total and done <= self.plan.total:
            self._mark = mark
            self._at_mark(done if self.plan.in_step else mark * self.plan.every)
        if not self.plan.in_step and self._leads and self._meter.elapsed("posts") > LOOK_FOR_POSTS_S:
            self._meter.restart("posts")
            self.judge.posted()

    def _at_mark(self, number: int) -> None:
        self._save(number)
        if self.plan.in_step:
            self.judge.together(self.learner, "valid", self.plan.chunks.samples_before(number))

    # Saving ---------------------------------------------------------------------------------------------------------------

    def _position(self) -> Position:
        return Position(self._start, self._steps, tuple(self._used) if not self.plan.in_step else ())

    def _save(self, number: int) -> None:
        self._counts.elapsed_s = self._elapsed()
        parts = {
            "learner": self.learner.state_dict(),
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        state = state_of(self._position(), self.plan, self._counts, self.learner.strategy.voice, parts)
        self.checkpoints.save(self.plan.chunks.samples_before(number), state, self.learner.membership.living)

    def _restore(self, state: dict[str, Any]) -> None:
        begun = self.learner.state_dict()
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.learner.load_state_dict(state["learner"] or begun)
        if state["random"] is not None:
            set_random_state(state["random"])

    def _save_the_stop(self) -> None:
        if self.plan.in_step:
            number = self.plan.number_of_step(self._position())
        else:
            number = self.line.mark(otherwise=max(self._used, default=-1) + 1)
        self._save(number)

    def _save_the_end(self) -> None:
        """A finished run leaves the mean model, and what it is worth."""
        if self.config.synchronous:
            self._save(self.plan.total)
            self.learner.finish()
        else:
            self.learner.finish()  # first: what is still under way belongs to the mean
            self._save(self.plan.total)
        self._report(self.plan.total)
        self._end_together() if self.config.synchronous else self._end_alone()

    def _end_together(self) -> None:
        figures = {split: self.judge.together(self.learner, split, self._samples_in_run) for split in SPLITS}
        with self.learner.consensus() as mean:
            if self.world.rank == 0:
                self._leave(mean, figures)

    def _end_alone(self) -> None:
        """All have saved: the first of them does the rest; if it is lost meanwhile, the next."""
        self.checkpoints.wait()
        left = False
        while True:
            met = self.company.gather(left=left)
            if any(met.values.values()):
                return
            if self.id == min(met.membership.living):
                self._leave_mean_of(met.membership.living)
                left = True

    def _leave_mean_of(self, learners: tuple[int, ...]) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(max(threads, len(os.sched_getaffinity(0))))  # the others wait
        mean = self.judge.mean_of(self._samples_in_run, learners)
        self._leave(mean, {split: self.judge.alone(mean, split, self._samples_in_run) for split in SPLITS})
        torch.set_num_threads(threads)

    def _leave(self, mean: nn.Module, figures: dict[str, dict[str, float]]) -> None:
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in mean.state_dict().items()}
        write_whole(self.folder / "model.safetensors", save(tensors))
        config = {"task": self.config.task, "settings": as_table(self.config)["settings"], "seed": self.config.seed}
        write_whole(self.folder / "config.json", json.dumps(config, indent=2).encode())
        run = {"elapsed_s": self._elapsed(), "samples": self._samples_in_run, "learners": self.world.size}
        results = {"finished": True} | run | figures
        self.task.leave(self.folder)
        write_whole(self.folder / "results.json", json.dumps(results, indent=2).encode())

    # Telling ---------------------------------------------------------------------------------------------------------------

    def _report(self, number: int) -> None:
        row: Row = {
            "kind": "learner",
            "learner": self.id,
            "samples_seen": self.plan.chunks.samples_before(min(number, self.plan.total)),
            "total": self._samples_in_run,
            "samples": self._counts.samples,
            "skipped": self._counts.skipped,
            "lr": self.optimizer.param_groups[0]["lr"],
        }
        audited = self._audit.figures(self.learner.strategy.weights()) if self._audit else {}
        self._write(row | self.learner.metrics() | self._meter.window() | audited)

    def _write(self, row: Row) -> None:
        self._meter.write(row | {"elapsed_s": self._elapsed()})

    def _elapsed(self) -> float:
        return self._earlier_s + time.perf_counter() - self._began
