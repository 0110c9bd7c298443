"""A recipe on the virtual clock: the data, schedule, strategy and run directory of a real run, without its processes.

Samples, rates, random numbers and the order of arithmetic are those of `roundelay train`, learner by learner, so that a
synchronous run gives the same model; only time is modelled. Checkpoints are left out: a simulation is run again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from roundelay.clock import Process, VirtualClock
from roundelay.cluster.environment import World
from roundelay.cluster.membership import Membership
from roundelay.cluster.rendezvous.cursor import Cursor
from roundelay.simulation.compute import Compute
from roundelay.simulation.network import Links, ModelledNetwork
from roundelay.training.build import optimizer_of, strategy_of
from roundelay.training.checkpoint import write_whole
from roundelay.training.config import Config
from roundelay.training.data import Draw, batches
from roundelay.training.evaluator import evaluating
from roundelay.training.metrics import JsonLines, Row
from roundelay.training.partition import Partition, Position
from roundelay.training.recipes import as_table, task_class
from roundelay.training.schedule import Schedule
from roundelay.weights.average import mean_module
from roundelay.weights.replica import Replica

Progress = Callable[[float], None]


class SimulatedRun:
    """All learners of a configuration.

    Args:
        config: of the run.
        folder: of the run, begun already (`run_directory.begin`).
        links: the cluster; its nodes are the machines of `group_size = 0`.
        compute: how long steps take.
    """

    def __init__(self, config: Config, folder: Path, links: Links, compute: Compute) -> None:
        self.config, self.folder, self.links, self.compute = config, folder, links, compute
        self.clock = VirtualClock()
        self.network = ModelledNetwork(self.clock, config.learners, links)
        self.task = task_class(config.task)(config.settings, config.seed)
        self._cursor = _Cursor()
        self.learners = [_RecipeLearner(self, rank) for rank in range(config.learners)]
        plan = self.learners[0].plan
        self.total = plan.chunks.samples_before(plan.total)
        self._sink = JsonLines(folder / "metrics.jsonl")
        self._arrived: dict[int, int] = {}
        self._mean = self.task.module()

    def run(self, progress: Progress = lambda part: None) -> dict[str, Any]:
        """Train; the figures of the mean model, which are in results.json too. Ctrl-C leaves the rows so far."""
        for learner in self.learners:
            self.clock.spawn(learner.process(progress), f"learner {learner.rank}")
        try:
            self.clock.run()
            return self._leave()
        finally:
            self._sink.close()

    def write(self, row: Row) -> None:
        """One row of metrics.jsonl, at this virtual time."""
        self._sink.write(row | {"elapsed_s": self.clock.now()})

    def at_mark(self, number: int, *, all_come: bool) -> None:
        """Evaluate the mean model once: where learners step together when the last has come here, else with the first."""
        self._arrived[number] = self._arrived.get(number, 0) + 1
        if self._arrived[number] == (len(self.learners) if all_come else 1):
            self._evaluate("valid", self.learners[0].plan.chunks.samples_before(number))

    def _evaluate(self, split: str, place: int) -> dict[str, float]:
        self._mean.load_state_dict(mean_module([one.state() for one in self.learners if one.strategy.voice]))
        with evaluating(self._mean):
            sums = self.task.evaluate(self._mean, split)
        samples = sums.pop("samples")
        figures = {name: total / max(samples, 1.0) for name, total in sums.items()}
        self.write({"kind": "evaluation", "split": split, "samples_seen": place, "samples": samples} | figures)
        return figures

    def _leave(self) -> dict[str, Any]:
        figures = {split: self._evaluate(split, self.total) for split in ("valid", "test")}
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in self._mean.state_dict().items()}
        write_whole(self.folder / "model.safetensors", save(tensors))
        described = {"task": self.config.task, "settings": as_table(self.config)["settings"], "seed": self.config.seed}
        write_whole(self.folder / "config.json", json.dumps(described, indent=2).encode())
        run = {"elapsed_s": self.clock.now(), "samples": self.total, "learners": self.config.learners}
        results = {"finished": True, "simulated": True} | run | figures
        write_whole(self.folder / "results.json", json.dumps(results, indent=2).encode())
        return results


class _RecipeLearner:
    """One learner, as `training.trainer.Trainer` is one in a real run."""

    def __init__(self, run: SimulatedRun, rank: int) -> None:
        config, size = run.config, run.config.learners
        node = min(run.links.node_size, size)
        world = World(rank, size, rank % node, node)
        self.rank, self._run, self._config = rank, run, config
        self.plan = Partition.of(config, world, len(run.task), rank)
        self.module = run.task.module()
        self._optimizer = optimizer_of(config.optimizer, run.task.parameter_groups(self.module))
        self.strategy = strategy_of(config, world)
        self._transport = run.network.transports[rank]
        self._schedule = Schedule(
            config.optimizer,
            config.schedule,
            batch=config.data.batch * size,
            epoch=len(run.task),
            total=self.plan.chunks.samples_before(self.plan.total),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed * 1_000_003 + rank)
            self._random = torch.get_rng_state()
        self._steps = self._samples = self._skipped = self._mark = 0
        self._computed_s = self._told_s = 0.0
        self._losses: list[float] = []

    def process(self, progress: Progress) -> Process:
        """The whole run of this learner."""
        run, strategy = self._run, self.strategy
        strategy.attach(Replica(self.module), self._transport, Membership.of(self._config.learners))
        self._transport.on_lost(strategy.lost)
        self._transport.on_quiet(strategy.unheard)
        self.module.train()
        draws = self.plan.draws(Position(), [], run._cursor, lambda: self._steps)
        loader = batches(
            run.task, self.plan.chunks, draws, member=self.plan.member, members=self.plan.members, workers=0
        )
        for draw, samples, batch in loader:
            loss = self._gradient(draw, batch)
            seconds = run.compute(self.rank, self._steps, run.clock.now())
            self._computed_s += seconds
            yield seconds
            yield from strategy.after_backward()
            self._guard(loss)
            yield from strategy.before_step()
            self._optimizer.step()
            yield from strategy.after_step()
            self._after_step(draw, samples, loss, progress)
        yield from strategy.finish()
        self._report(self.plan.total)
        self._transport.close()

    def _gradient(self, draw: Draw, batch: Any) -> float:  # noqa: ANN401
        number = self.plan.number_of_step(Position(0, self._steps)) if self.plan.in_step else draw.number
        for group in self._optimizer.param_groups:
            group["lr"] = group.get("lr_scale", 1.0) * self._schedule.at(self.plan.chunks.samples_before(number))
        self._optimizer.zero_grad()
        torch.set_rng_state(self._random)
        loss = self._run.task.loss(self.module, batch)
        loss.backward()
        self._random = torch.get_rng_state()
        return float(loss.detach())

    def _guard(self, loss: float) -> None:
        """Clip; without a finite gradient the step only mixes, as in a real run."""
        gradients = [weight.grad for weight in self.module.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if math.isfinite(float(norm)) and (self.strategy.reduces_gradients or math.isfinite(loss)):
            if self._config.optimizer.clip:
                torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self._config.optimizer.clip, norm)
            return
        self._skipped += 1
        for weight in self.module.parameters():
            weight.grad = None

    def _after_step(self, draw: Draw, samples: int, loss: float, progress: Progress) -> None:
        self._steps += 1
        self._samples += samples
        self._losses.append(loss)
        done = self.plan.number_of_step(Position(0, self._steps)) if self.plan.in_step else draw.number + 1
        progress(min(1.0, done / self.plan.total))
        if self._run.clock.now() - self._told_s >= self._config.metrics.every_s:
            self._report(done)
        mark = done // self.plan.every
        if mark > self._mark and mark * self.plan.every < self.plan.total and done <= self.plan.total:
            self._mark = mark
            self._run.at_mark(done if self.plan.in_step else mark * self.plan.every, all_come=self.plan.in_step)

    def _report(self, number: int) -> None:
        now, steps, losses = self._run.clock.now(), max(self._steps, 1), [x for x in self._losses if math.isfinite(x)]
        row: Row = {
            "kind": "learner",
            "learner": self.rank,
            "samples_seen": self.plan.chunks.samples_before(min(number, self.plan.total)),
            "total": self._run.total,
            "samples": self._samples,
            "skipped": self._skipped,
            "lr": self._optimizer.param_groups[0]["lr"],
            "steps": self._steps,
            "step_s": now / steps,
            "compute_s": self._computed_s / steps,
            "wait_s": max(now - self._computed_s, 0.0) / steps,
            "mix_s": 0.0,
            "bytes_sent": self._transport.traffic.bytes_sent,
            "bytes_received": self._transport.traffic.bytes_received,
            "samples_per_s": self._samples / max(now, 1e-9),
        }
        if losses:
            row["loss"] = sum(losses) / len(losses)
        self._run.write(row | self.strategy.metrics())
        self._told_s, self._losses = now, []

    def state(self) -> dict[str, Tensor]:
        """The module's state, with the live weights where they are not the module's own."""
        state = dict(self.module.state_dict())
        live = self.strategy.weights()
        if live is not None:
            names = [name for name, weight in self.module.named_parameters() if weight.requires_grad]
            state.update(zip(names, live.views, strict=True))
        return state


class _Cursor:
    """What learners ask of a rendezvous, without a server."""

    def __init__(self) -> None:
        self._cursor: Cursor | None = None

    def begin(self, total: int, used: Sequence[int]) -> None:
        self._cursor = self._cursor or Cursor(total, used)

    def draw(self, group: int, index: int, done: int, *, patient: bool = False) -> int | None:
        assert self._cursor is not None
        return self._cursor.draw(group, index)
