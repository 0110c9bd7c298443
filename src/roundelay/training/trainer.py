"""The training loop of one learner: batches in, steps, marks at which it saves and the mean model is evaluated."""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.errors import DivergedError
from roundelay.launch import World
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, Strategy, SuperLearner
from roundelay.topology.catalogue import named
from roundelay.training import average
from roundelay.training.checkpoint import Checkpoint, Checkpoints, complete, read_state, write_whole
from roundelay.training.config import Config, OptimizerConfig
from roundelay.training.coordinator import Coordinator
from roundelay.training.data import Chunks, Draw, Draws, EqualDraws, SharedDraws, batches
from roundelay.training.metrics import JsonLines, Row, Sink, TensorBoard
from roundelay.training.recipes import as_table, task_class
from roundelay.training.schedule import Schedule
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
        members = config.group_size or world.local_size
        self.groups = world.size // members
        self.group, self.member = divmod(world.rank, members)
        self.members = members
        self.task = task_class(config.task)(config.settings, config.seed)
        self.chunks = Chunks(len(self.task), members * config.data.batch, config.seed)
        self.total = math.ceil(config.budget.epochs * self.chunks.per_epoch - 1e-9)
        self.every = max(1, round(config.checkpoint.every_epochs * self.chunks.per_epoch))
        self.schedule = Schedule(
            config.optimizer,
            config.schedule,
            batch=config.data.batch * world.size,
            epoch=len(self.task),
            total=self.chunks.place(self.total),
        )
        self.module = self.task.module().to(world.device)
        self.optimizer = _optimizer(config.optimizer, self.task.parameter_groups(self.module))
        self.checkpoints = Checkpoints(folder / "checkpoints", world.rank, config.checkpoint.keep)
        self._deterministic = config.synchronous and config.data.sharding == "static"
        self._slowness = config.slowness().get(world.rank, 1.0)
        self._start = 0  # chunks used by an earlier part of the run, where learners count for themselves
        self._steps = 0  # since `_start`
        self._used: list[int] = []  # numbers drawn from the coordinator and used
        self._skipped = self._skipped_in_a_row = 0
        self._samples = 0
        self._earlier_s = 0.0
        self._mark = 0  # the last one saved at
        self._evaluated = 0

    # The run -------------------------------------------------------------------------------------------------------

    def run(self, resumed: Checkpoint | None = None) -> bool:
        """Train until the budget is used up, or a signal asks to stop; True if it was used up."""
        torch.manual_seed(self.config.seed * 1_000_003 + self.world.rank)
        sinks: list[Sink] = [JsonLines(self.folder / self._metrics_name())]
        if self.config.metrics.tensorboard:
            sinks.append(TensorBoard(self.folder / "tensorboard" / f"learner-{self.world.rank}"))
        used, state = self._earlier(resumed)
        with Learner(
            self.module, self.optimizer, strategy_of(self.config, self.world), self.world.transport()
        ) as learner:
            self.learner = learner
            self._meter = _Meter(sinks, self.config.metrics.every_s)
            if state is not None:
                self._restore(state, len(used))
            finished = self._train(self._draws(used))
            self._save_the_end() if finished else self._save_the_stop()
        self.checkpoints.close()
        for sink in sinks:
            sink.close()
        return finished

    def _train(self, draws: Draws) -> bool:
        coordinated = self.config.synchronous or self.members > 1
        stop = StopRequest(self._coordinator.last_step if coordinated else lambda begun: begun)
        stop.listen()
        loader = batches(
            self.task,
            self.chunks,
            draws,
            member=self.member,
            members=self.members,
            workers=self.config.data.workers,
        )
        self._began = time.perf_counter()
        self.module.train()
        for draw, samples, batch in loader:
            if not stop.begin_step():
                return False
            self._step(draw, samples, self.task.to_device(batch, self.world.device))
            self._after_step(draw)
        return not stop.requested

    def _step(self, draw: Draw, samples: int, batch: Any) -> None:  # noqa: ANN401
        began = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("lr_scale", 1.0) * self.schedule.at(self.chunks.place(self._common_number(draw)))
        loss = self.task.loss(self.module, batch)
        loss.backward()
        if self._slowness > 1:
            time.sleep((self._slowness - 1) * (time.perf_counter() - began))
        self._guard(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._samples += samples
        self._steps += 1
        if not self._deterministic:
            self._used.append(draw.number)
        self._meter.add(self._last_loss, samples)

    def _guard(self, loss: Tensor) -> None:
        """Clip; without a finite gradient the step only mixes.

        The norm is of float32 squares, so where it is finite no gradient is above 2e19, and weights stay finite, too.
        Where gradients are reduced, all learners see the same norm, and take or skip the step together.
        """
        gradients = [weight.grad for weight in self.module.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._last_loss = float(loss.detach())
        finite = math.isfinite(float(norm))
        if finite and (self.learner.strategy.reduces_gradients or math.isfinite(self._last_loss)):
            self._skipped_in_a_row = 0
            if self.config.optimizer.clip:
                torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.config.optimizer.clip, norm)
            return
        for weight in self.module.parameters():
            weight.grad = None
        self._skipped += 1
        self._skipped_in_a_row += 1
        log.warning("learner %d skips a step: its loss is %g, its gradient %g", self.world.rank, self._last_loss, norm)
        if self._skipped_in_a_row >= DIVERGED_AFTER:
            raise DivergedError(
                f"learner {self.world.rank} had no finite gradient in {DIVERGED_AFTER} steps; {self._last_good()}; "
                "a lower optimizer.lr, a longer schedule.warmup_epochs or optimizer.clip may help"
            )

    def _last_good(self) -> str:
        self.checkpoints.wait()
        good = complete(self.checkpoints.folder)
        return f"the last good checkpoint is '{good[-1].folder}'" if good else "there is no checkpoint yet"

    # Places in the run ------------------------------------------------------------------------------------------------

    def _common_number(self, draw: Draw) -> int:
        """The number that says how far the run is at this step: the same for all learners that step together."""
        return self._start + self._steps * self.groups if self._deterministic else draw.number

    def _after_step(self, draw: Draw) -> None:
        done = self._start + self._steps * self.groups if self._deterministic else draw.number + 1
        if self._meter.due():
            self._report(done)
        mark = done // self.every
        # The last chunks may be fewer than learners: a mark that not all would reach is left to the end.
        if mark > self._mark and mark * self.every < self.total and done <= self.total:
            self._mark = mark
            self._at_mark(done if self._deterministic else mark * self.every)
        if not self._deterministic and self.world.rank == 0 and self._meter.elapsed("posts") > LOOK_FOR_POSTS_S:
            self._meter.restart("posts")
            self._evaluate_posted()

    def _at_mark(self, number: int) -> None:
        self._save(number)
        if self._deterministic:
            self._evaluate_together("valid", number)

    # Saving and resuming ------------------------------------------------------------------------------------------------

    def _save(self, number: int) -> None:
        state = {
            "learner": self.learner.state_dict(),
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": _random_state(),
            "used": torch.tensor(self._used, dtype=torch.int64),
            "counted": {
                "start": self._start,
                "steps": self._steps,
                "groups": self.groups,
                "per_epoch": self.chunks.per_epoch,
                "samples": self._samples,
                "skipped": self._skipped,
                "elapsed_s": self._elapsed(),
                "voice": self.learner.strategy.voice,
            },
        }
        self.checkpoints.save(self.chunks.place(number), state, self.learner.membership.living)

    def _earlier(self, resumed: Checkpoint | None) -> tuple[list[int], dict[str, Any] | None]:
        """The numbers that an earlier part of the run has used, and the state that this learner goes on from."""
        if resumed is None:
            return [], None
        if set(resumed.files) == set(range(self.world.size)):
            states = [read_state(resumed.path(learner)) for learner in sorted(resumed.files)]
            mine = states[self.world.rank]
        else:
            states = [read_state(resumed.path(learner)) for learner in sorted(resumed.files)]
            mine = self._redistributed(states)
            if self.world.rank == 0:
                log.warning(
                    "%d learners go on from the mean of the %d that saved; momentum is their mean, too",
                    self.world.size,
                    len(states),
                )
        counted = mine["counted"]
        per_epoch = counted["per_epoch"]
        used = sorted({number for state in states for number in state["used"].tolist()})
        if not used:  # they counted for themselves
            used = list(range(counted["start"] + counted["steps"] * counted["groups"]))
        if per_epoch != self.chunks.per_epoch:  # other chunks: as many as make the same part of the run
            used = list(range(math.ceil(len(used) * self.chunks.per_epoch / per_epoch)))
        same = (
            per_epoch == self.chunks.per_epoch and counted["groups"] == self.groups and len(states) == self.world.size
        )
        if not same:
            counted |= {"start": len(used), "steps": 0}
            mine["used"] = torch.empty(0, dtype=torch.int64)
        return used, mine

    @staticmethod
    def _redistributed(states: list[dict[str, Any]]) -> dict[str, Any]:
        speaking = [state for state in states if state["counted"]["voice"]]
        return states[0] | {
            "module": average.mean_module([state["module"] for state in speaking]),
            "optimizer": average.mean_tree([state["optimizer"] for state in speaking]),
            "random": None,
        }

    def _restore(self, state: dict[str, Any], used: int) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.learner.load_state_dict(state["learner"])
        counted = state["counted"]
        self._start, self._steps = counted["start"], counted["steps"]
        self._samples, self._skipped = counted["samples"], counted["skipped"]
        self._earlier_s = counted["elapsed_s"]
        self._used = state["used"].tolist()
        self._mark = used // self.every
        self._evaluated = self.chunks.place(used)
        if state["random"] is not None:
            _set_random_state(state["random"])

    def _draws(self, used: list[int]) -> Draws:
        if self._deterministic:
            return EqualDraws(self.group, self.groups, self.total, start=self._start, done=self._steps)
        self._coordinator.begin(self.total, used)
        dynamic = self.config.data.sharding == "dynamic"
        return SharedDraws(self._coordinator, self.group, self.groups, dynamic=dynamic, done=len(self._used))

    # Judging -----------------------------------------------------------------------------------------------------------

    def _evaluate_together(self, split: str, number: int) -> dict[str, float]:
        """Every learner evaluates its share of the split on the exact mean model."""
        with self.learner.consensus() as mean, _evaluating(mean):
            sums = self.task.evaluate(mean, split, self.world.rank, self.world.size)
        totals = torch.tensor(list(sums.values()), dtype=torch.float64)
        self.learner.transport.all_reduce(totals, self.learner.membership.living).result()
        return self._judge(split, number, dict(zip(sums, totals.tolist(), strict=True)))

    def _evaluate_posted(self) -> None:
        """Learner 0, alone: the mean of what all have posted at the newest mark, if that is new."""
        posted = [each for each in complete(self.checkpoints.folder) if each.place > self._evaluated]
        if not posted:
            return
        newest = posted[-1]
        self._evaluated = newest.place
        states = [read_state(newest.path(learner)) for learner in newest.files]
        mean = self.task.module().to(self.world.device)
        mean.load_state_dict(average.mean_module([s["module"] for s in states if s["counted"]["voice"]]))
        with _evaluating(mean):
            sums = self.task.evaluate(mean, "valid")
        number = max(0, round(newest.place / len(self.task) * self.chunks.per_epoch))
        self._judge("valid", number, sums)

    def _judge(self, split: str, number: int, sums: dict[str, float]) -> dict[str, float]:
        samples = sums["samples"]
        figures = {name: total / max(samples, 1.0) for name, total in sums.items() if name != "samples"}
        place = self.chunks.place(number)
        if self.world.rank == 0:
            row = {
                "kind": "evaluation",
                "split": split,
                "place": place,
                "elapsed_s": self._elapsed(),
                "samples": samples,
            }
            self._meter.write(row | figures)
            if split == "valid":
                self._remember_best(place, figures)
        return figures

    def _remember_best(self, place: int, figures: dict[str, float]) -> None:
        name = self.task.judged_by.removeprefix("-")
        worth = figures[name] * (-1 if self.task.judged_by.startswith("-") else 1)
        if worth > getattr(self, "_best", -math.inf):
            self._best = worth
            self.checkpoints.mark_best(place)

    def _save_the_stop(self) -> None:
        self._save(self._start + self._steps * self.groups if self._deterministic else self._coordinator.mark())

    def _save_the_end(self) -> None:
        """A finished run leaves the mean model, and what it is worth."""
        self._save(self.total)
        self._report(self.total)
        results = {split: self._evaluate_together(split, self.total) for split in ("valid", "test")}
        with self.learner.consensus() as mean:
            if self.world.rank == 0:
                self._leave_model(mean, results)

    def _leave_model(self, mean: nn.Module, results: dict[str, dict[str, float]]) -> None:
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in mean.state_dict().items()}
        write_whole(self.folder / "model.safetensors", save(tensors))
        config = {"task": self.config.task, "settings": as_table(self.config)["settings"], "seed": self.config.seed}
        write_whole(self.folder / "config.json", json.dumps(config, indent=2).encode())
        document = {
            "finished": True,
            "elapsed_s": self._elapsed(),
            "samples": self.chunks.place(self.total),
            "learners": self.world.size,
        }
        write_whole(self.folder / "results.json", json.dumps(document | results, indent=2).encode())

    # Telling -----------------------------------------------------------------------------------------------------------

    def _report(self, number: int) -> None:
        row = {
            "kind": "learner",
            "learner": self.world.rank,
            "elapsed_s": self._elapsed(),
            "place": self.chunks.place(min(number, self.total)),
            "total": self.chunks.place(self.total),
            "samples": self._samples,
            "skipped": self._skipped,
            "lr": self.optimizer.param_groups[0]["lr"],
        }
        self._meter.write(row | self.learner.metrics() | self._meter.window())

    def _elapsed(self) -> float:
        return self._earlier_s + time.perf_counter() - self._began

    def _metrics_name(self) -> str:
        one_machine = self.world.local_size == self.world.size
        return "metrics.jsonl" if one_machine else f"metrics-{self.world.rank // self.world.local_size}.jsonl"


class _Meter:
    """What happened since the last row, and when the next is due."""

    def __init__(self, sinks: list[Sink], every_s: float) -> None:
        self._sinks, self._every_s = sinks, every_s
        self._since: dict[str, float] = {}
        self._loss, self._steps, self._samples = 0.0, 0, 0
        self.restart("row")
        self.restart("posts")

    def add(self, loss: float, samples: int) -> None:
        if math.isfinite(loss):
            self._loss += loss
            self._steps += 1
        self._samples += samples

    def elapsed(self, what: str) -> float:
        return time.perf_counter() - self._since[what]

    def restart(self, what: str) -> None:
        self._since[what] = time.perf_counter()

    def due(self) -> bool:
        return self.elapsed("row") >= self._every_s

    def window(self) -> Row:
        """The mean loss and the speed since the last row."""
        row: Row = {"samples_per_s": self._samples / max(self.elapsed("row"), 1e-9)}
        if self._steps:
            row["loss"] = self._loss / self._steps
        self._loss, self._steps, self._samples = 0.0, 0, 0
        self.restart("row")
        return row

    def write(self, row: Row) -> None:
        for sink in self._sinks:
            sink.write(row)


class _evaluating:  # noqa: N801  # reads as the statement it is used in
    """A module in evaluation mode, without gradients; random states are put back."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._no_grad = module, torch.no_grad()

    def __enter__(self) -> None:
        self._training, self._random = self._module.training, _random_state()
        self._module.eval()
        self._no_grad.__enter__()

    def __exit__(self, *error: object) -> None:
        self._no_grad.__exit__(None, None, None)
        self._module.train(self._training)
        _set_random_state(self._random)


def strategy_of(config: Config, world: World) -> Strategy:
    """The strategy that the configuration names, for the learners that are there."""
    group_size = config.group_size or world.local_size
    groups = world.size // group_size
    between: Strategy
    if config.strategy == "adpsgd":
        between = ADPSGD(named(config.topology, groups, config.seed), config.max_lead)
    elif config.strategy == "dpsgd":
        between = DPSGD(named(config.topology, groups, config.seed))
    elif config.strategy == "allreduce":
        between = Allreduce()
    else:
        between = DelayByOne("gradients" if config.strategy.endswith("gradients") else "weights")
    return SuperLearner(between, group_size) if group_size > 1 else between


def _optimizer(config: OptimizerConfig, parameters: Iterable[Any]) -> Optimizer:
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=config.lr, weight_decay=config.weight_decay)


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
