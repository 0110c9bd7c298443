"""A recipe on the virtual clock: the data, schedule, strategy and run directory of a real run, without its processes.

Samples, learning rates, random numbers and the order of arithmetic are those of `roundelay train`, learner by learner, so
a synchronous run gives the same model. Only time is modelled. A simulation saves no checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundelay.clock import Process, VirtualClock
from roundelay.cluster.environment import World
from roundelay.cluster.membership import Membership
from roundelay.cluster.rendezvous.cursor import Cursor
from roundelay.simulation.compute import Compute
from roundelay.simulation.network import Links, ModelledNetwork
from roundelay.training import run_directory
from roundelay.training.build import learner_seed, optimizer_of, schedule_of, strategy_of
from roundelay.training.config import Config
from roundelay.training.data import Draw, batches
from roundelay.training.evaluator import SPLITS, Evaluator, check_judged_by, mean_model
from roundelay.training.metrics import JsonLines, Meter
from roundelay.training.partition import Partition, Position
from roundelay.training.recipes import task_of
from roundelay.training.run_result import write_result
from roundelay.training.state import State
from roundelay.training.step import TrainingStep
from roundelay.weights import replica_of

ReportProgress = Callable[[float], None]


class SimulatedRun:
    """All learners of a configuration, on one virtual clock.

    Args:
        config: of the run.
        folder: of the run; `run_directory.begin` has made it.
        links: the cluster. With `group_size = 0`, the learners of one node form a super-learner.
        compute: gives the duration of every step.

    Raises ConfigError if the task is judged by a figure that it does not have.
    """

    def __init__(self, config: Config, folder: Path, links: Links, compute: Compute) -> None:
        self.config, self.folder, self.links, self.compute = config, folder, links, compute
        self.clock = VirtualClock()
        self.network = ModelledNetwork(self.clock, config.learners, links)
        self.task = task_of(config)
        check_judged_by(self.task, self.task.module())
        self.cursor = _LocalCursor()
        self.sink = JsonLines(folder / run_directory.METRICS)
        self._evaluator = Evaluator(self.task, Meter([self.sink], config.metrics.every_s, self.clock.now).write)
        self.learners = [_SimulatedLearner(self, rank) for rank in range(config.learners)]
        self._arrived: dict[int, int] = {}

    def run(self, progress: ReportProgress = lambda part: None) -> dict[str, Any]:
        """Train, write the result, and return the content of results.json. If interrupted, the metrics so far stay."""
        for learner in self.learners:
            self.clock.spawn(learner.process(progress), f"learner {learner.rank}")
        try:
            self.clock.run()
            return self._finish()
        finally:
            self.sink.close()

    def at_boundary(self, number: int, *, lockstep: bool) -> None:
        """Evaluate the mean model once per boundary: in lockstep when the last learner reaches it, else the first."""
        self._arrived[number] = self._arrived.get(number, 0) + 1
        if self._arrived[number] == (len(self.learners) if lockstep else 1):
            samples_seen = self.learners[0].position.partition.chunks.samples_before(number)
            self._evaluator.evaluate(self._mean(), "valid", samples_seen)

    def _mean(self) -> nn.Module:
        return mean_model(self.task, [learner.state() for learner in self.learners])

    def _finish(self) -> dict[str, Any]:
        mean, samples = self._mean(), self.learners[0].position.partition.samples
        figures = {split: self._evaluator.evaluate(mean, split, samples) for split in SPLITS}
        run = {"elapsed_s": self.clock.now(), "samples": samples, "learners": self.config.learners}
        results = {"simulated": True} | run | figures
        write_result(self.folder, self.config, self.task, mean, results)
        return results


class _SimulatedLearner:
    """One learner: what `Trainer` and `Learner` do, as a generator that yields where a real learner computes or waits."""

    def __init__(self, run: SimulatedRun, rank: int) -> None:
        config, task = run.config, run.task
        node = min(run.links.node_size, config.learners)
        world = World(rank, config.learners, rank % node, node)
        self.rank, self._run = rank, run
        self.strategy = strategy_of(config, node)
        synchronous = self.strategy.synchronous
        self.position = Position(Partition.of(config, world, len(task), rank, synchronous=synchronous))
        self.module = task.module()
        self._optimizer = optimizer_of(config.optimizer, task.parameter_groups(self.module))
        schedule = schedule_of(config, len(task), self.position.partition.samples, self.strategy)
        self._step = TrainingStep(
            rank, task, self.module, self._optimizer, schedule=schedule, clip=config.optimizer.clip
        )
        self._meter = Meter([run.sink], config.metrics.every_s, run.clock.now)
        self._transport = run.network.transports[rank]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(learner_seed(config, rank))
            self._random = torch.get_rng_state()
        self._computed_s = 0.0

    def process(self, progress: ReportProgress) -> Process:
        """The whole run of this learner."""
        run, strategy, part = self._run, self.strategy, self.position.partition
        strategy.attach(replica_of(self.module), self._transport, Membership.of(run.config.learners))
        self._transport.on_lost(strategy.peer_lost)
        self._transport.on_silent(strategy.peer_silent)
        self.module.train()
        draws = self.position.draws(run.cursor, [], lambda: self.position.steps)
        loader = batches(run.task, part.chunks, draws, member=part.member, members=part.members, workers=0)
        for draw, samples, batch in loader:
            self._gradient(batch, draw)
            seconds = run.compute(self.rank, self.position.steps, run.clock.now())
            self._computed_s += seconds
            yield seconds
            yield from strategy.after_backward()
            self._step.guard(reduced=strategy.reduces_gradients)
            yield from strategy.before_step()
            self._optimizer.step()
            yield from strategy.after_step()
            boundary = self._step.count(draw, samples, self.position, self._meter)
            progress(min(1.0, self.position.done / part.total))
            if self._meter.due():
                self._write_row()
            if boundary is not None:
                run.at_boundary(boundary, lockstep=part.lockstep)
        yield from strategy.finish()
        self._write_row(finished=True)
        self._transport.close()

    def _gradient(self, batch: Any, draw: Draw) -> None:  # noqa: ANN401
        """The gradient, with this learner's own random numbers: all learners share torch's default generator."""
        torch.set_rng_state(self._random)
        self._step.gradient(batch, self.position.samples_before_step(draw))
        self._random = torch.get_rng_state()

    def _write_row(self, *, finished: bool = False) -> None:
        now, steps = self._run.clock.now(), max(self.position.steps, 1)
        figures = {
            "steps": self.position.steps,
            "step_s": now / steps,
            "compute_s": self._computed_s / steps,
            "wait_s": max(now - self._computed_s, 0.0) / steps,
            "mix_s": 0.0,
            "bytes_sent": self._transport.traffic.bytes_sent,
            "bytes_received": self._transport.traffic.bytes_received,
        }
        row = self._step.row(self.position, finished=finished)
        window = self._meter.last_window() if finished else self._meter.window()
        self._meter.write(row | figures | window | self.strategy.metrics())

    def state(self) -> State:
        """What `mean_model` needs: the module's state with the weights that exchanges act on, and the consensus weight."""
        module = dict(self.module.state_dict())
        live = self.strategy.weights()
        if live is not None:
            names = [name for name, weight in self.module.named_parameters() if weight.requires_grad]
            module.update(zip(names, live.views, strict=True))
        return {"module": module, "consensus_weight": self.strategy.consensus_weight}


class _LocalCursor:
    """The shared cursor of a run, without a server."""

    def __init__(self) -> None:
        self._cursor: Cursor | None = None

    def declare(self, total: int, used: Sequence[int]) -> None:
        self._cursor = self._cursor or Cursor(total, used)

    def draw(self, group: int, index: int, done: int, *, patient: bool = False) -> int | None:
        assert self._cursor is not None
        return self._cursor.draw(group, index)
