"""The training loop of one learner: batches in, steps, and marks at which it saves and the mean model is judged."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from roundelay.errors import DivergedError
from roundelay.launch import World
from roundelay.learner import Learner
from roundelay.training.build import optimizer_of, strategy_of
from roundelay.training.checkpoint import Checkpoint, Checkpoints, complete, write_whole
from roundelay.training.config import Config
from roundelay.training.coordinator import Coordinator
from roundelay.training.data import Draw, Draws, batches
from roundelay.training.judge import Judge
from roundelay.training.metrics import JsonLines, Meter, Row, Sink, TensorBoard
from roundelay.training.plan import Plan, Position
from roundelay.training.recipes import as_table, task_class
from roundelay.training.schedule import Schedule
from roundelay.training.state import Earlier, earlier, set_random_state, state_of
from roundelay.training.stopping import StopRequest

log = logging.getLogger("roundelay")

DIVERGED_AFTER = 10  # steps in a row without a finite gradient
LOOK_FOR_POSTS_S = 1.0  # how often learner 0 looks whether all asynchronous learners have posted


class Trainer:
    """One learner of a run.

    Args:
        config: of the run.
        folder: of the run.
        world: who this learner is.
        coordinator: what learners agree on.
    """

    def __init__(self, config: Config, folder: Path, world: World, coordinator: Coordinator) -> None:
        self.config, self.folder, self.world, self._coordinator = config, folder, world, coordinator
        self.task = task_class(config.task)(config.settings, config.seed)
        self.plan = Plan.of(config, world, len(self.task))
        self._samples_in_run = self.plan.chunks.place(self.plan.total)
        self.schedule = Schedule(
            config.optimizer,
            config.schedule,
            batch=config.data.batch * world.size,
            epoch=len(self.task),
            total=self._samples_in_run,
        )
        self.module = self.task.module().to(world.device)
        self.optimizer = optimizer_of(config.optimizer, self.task.parameter_groups(self.module))
        self.checkpoints = Checkpoints(folder / "checkpoints", world.rank, config.checkpoint.keep)
        self.judge = Judge(self.task, world, self.checkpoints, self._write)
        self._slowness = config.slowness().get(world.rank, 1.0)
        self._mark = self._skipped_in_a_row = 0
        self._loss = math.nan
        self._stop_class = StopRequest

    def run(self, resumed: Checkpoint | None = None) -> bool:
        """Train until the budget is used up, or a signal asks to stop; True if it was used up."""
        torch.manual_seed(self.config.seed * 1_000_003 + self.world.rank)
        past = earlier(resumed, self.world.rank, self.world.size, self.plan)
        self._begin(past)
        strategy = strategy_of(self.config, self.world)
        with Learner(self.module, self.optimizer, strategy, self.world.transport()) as self.learner:
            if past.state is not None:
                self._restore(past.state)
                if self.world.rank == 0:
                    self._write({"kind": "event", "event": "resumed", "place": self.judge.newest})
            finished = self._train(self.plan.draws(past.position, past.used, self._coordinator))
            self._save_the_end() if finished else self._save_the_stop()
        self.checkpoints.close()
        self._meter.close()
        return finished

    def _begin(self, past: Earlier) -> None:
        self._start, self._steps, self._used = past.position.start, past.position.steps, list(past.position.used)
        self._counts, self._earlier_s = past.counts, past.counts.elapsed_s
        self._mark = len(past.used) // self.plan.every
        self.judge.newest = self.plan.chunks.place(len(past.used))
        self._began = time.perf_counter()
        one_machine = self.world.local_size == self.world.size
        name = "metrics.jsonl" if one_machine else f"metrics-{self.world.rank // self.world.local_size}.jsonl"
        sinks: list[Sink] = [JsonLines(self.folder / name)]
        if self.config.metrics.tensorboard:
            sinks.append(TensorBoard(self.folder / "tensorboard" / f"learner-{self.world.rank}"))
        self._meter = Meter(sinks, self.config.metrics.every_s)

    # A step ---------------------------------------------------------------------------------------------------------------

    def _train(self, draws: Draws) -> bool:
        together = self.config.synchronous or self.plan.members > 1
        stop = self._stop_class(self._coordinator.last_step if together else lambda begun: begun)
        stop.listen()
        loader = batches(
            self.task,
            self.plan.chunks,
            draws,
            member=self.plan.member,
            members=self.plan.members,
            workers=self.config.data.workers,
        )
        self._began = time.perf_counter()
        self.module.train()
        with contextlib.closing(stop):
            for draw, samples, batch in loader:
                if not stop.begin_step():
                    return False
                self._step(draw, samples, self.task.to_device(batch, self.world.device))
                self._after_step(draw)
            return not stop.requested

    def _step(self, draw: Draw, samples: int, batch: Any) -> None:  # noqa: ANN401
        began = time.perf_counter()
        number = self.plan.number_of_step(self._position()) if self.plan.in_step else draw.number
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("lr_scale", 1.0) * self.schedule.at(self.plan.chunks.place(number))
        loss = self.task.loss(self.module, batch)
        loss.backward()
        if self._slowness > 1:
            time.sleep((self._slowness - 1) * (time.perf_counter() - began))
        self._guard(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1
        self._counts.samples += samples
        if not self.plan.in_step:
            self._used.append(draw.number)
        self._meter.add(self._loss, samples)

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
        log.warning("learner %d skips a step: its loss is %g, its gradient %g", self.world.rank, self._loss, norm)
        if self._skipped_in_a_row >= DIVERGED_AFTER:
            raise DivergedError(
                f"learner {self.world.rank} had no finite gradient in {DIVERGED_AFTER} steps; {self._last_good()}; "
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
        if not self.plan.in_step and self.world.rank == 0 and self._meter.elapsed("posts") > LOOK_FOR_POSTS_S:
            self._meter.restart("posts")
            self.judge.posted()

    def _at_mark(self, number: int) -> None:
        self._save(number)
        if self.plan.in_step:
            self.judge.together(self.learner, "valid", self.plan.chunks.place(number))

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
        self.checkpoints.save(self.plan.chunks.place(number), state, self.learner.membership.living)

    def _restore(self, state: dict[str, Any]) -> None:
        begun = self.learner.state_dict()
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.learner.load_state_dict(state["learner"] or begun)
        if state["random"] is not None:
            set_random_state(state["random"])

    def _save_the_stop(self) -> None:
        self._save(self.plan.number_of_step(self._position()) if self.plan.in_step else self._coordinator.mark())

    def _save_the_end(self) -> None:
        """A finished run leaves the mean model, and what it is worth."""
        self._save(self.plan.total)
        if self.config.synchronous:  # those with a step more still need the others; asynchronous ones are served anyway
            self.learner.finish()
        self._report(self.plan.total)
        figures = {split: self.judge.together(self.learner, split, self._samples_in_run) for split in ("valid", "test")}
        with self.learner.consensus() as mean:
            if self.world.rank == 0:
                self._leave(mean, figures)

    def _leave(self, mean: nn.Module, figures: dict[str, dict[str, float]]) -> None:
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in mean.state_dict().items()}
        write_whole(self.folder / "model.safetensors", save(tensors))
        config = {"task": self.config.task, "settings": as_table(self.config)["settings"], "seed": self.config.seed}
        write_whole(self.folder / "config.json", json.dumps(config, indent=2).encode())
        run = {"elapsed_s": self._elapsed(), "samples": self._samples_in_run, "learners": self.world.size}
        results = {"finished": True} | run | figures
        write_whole(self.folder / "results.json", json.dumps(results, indent=2).encode())

    # Telling ---------------------------------------------------------------------------------------------------------------

    def _report(self, number: int) -> None:
        row: Row = {
            "kind": "learner",
            "learner": self.world.rank,
            "place": self.plan.chunks.place(min(number, self.plan.total)),
            "total": self._samples_in_run,
            "samples": self._counts.samples,
            "skipped": self._counts.skipped,
            "lr": self.optimizer.param_groups[0]["lr"],
        }
        self._write(row | self.learner.metrics() | self._meter.window())

    def _write(self, row: Row) -> None:
        self._meter.write(row | {"elapsed_s": self._elapsed()})

    def _elapsed(self) -> float:
        return self._earlier_s + time.perf_counter() - self._began
