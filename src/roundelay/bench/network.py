"""Strategies on slow links: steps per second, bytes, and time to a validation loss, on machines that `namespaces` emulates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roundelay.bench.local import running
from roundelay.bench.namespaces import INTERFACE, Machine, machines, shape
from roundelay.errors import RoundelayError
from roundelay.language.text import find_text
from roundelay.strategies import registry

PORT = 29400
EVALUATED_PIECES = 200  # of the validation text
ROUNDS = 3  # of local-sgd that a case lasts at least


@dataclass(frozen=True)
class Strategy:
    """A line of the result: its label, the registered name of the strategy, and the strategy's options."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


STRATEGIES = (
    Strategy("none", "none"),
    Strategy("ddp", "ddp"),
    Strategy("adpsgd", "adpsgd", {"topology": "random-ring"}),
    Strategy("adpsgd bfloat16", "adpsgd", {"topology": "random-ring", "wire": "bfloat16"}),
    Strategy("dpsgd", "dpsgd", {"topology": "random-ring"}),
    Strategy("delay-by-one", "delay-by-one"),
    Strategy("local-sgd complete", "local-sgd", {"topology": "complete"}),
    Strategy("local-sgd complete int8", "local-sgd", {"topology": "complete", "compress": "int8"}),
    Strategy("local-sgd complete overlap", "local-sgd", {"topology": "complete", "overlap": True}),
    Strategy(
        "local-sgd complete int8 overlap", "local-sgd", {"topology": "complete", "compress": "int8", "overlap": True}
    ),
    Strategy("local-sgd pairs", "local-sgd", {"topology": "random-matching"}),
    Strategy("local-sgd pairs int8", "local-sgd", {"topology": "random-matching", "compress": "int8"}),
    Strategy("local-sgd pairs overlap", "local-sgd", {"topology": "random-matching", "overlap": True}),
)


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        rates: of `tc`, such as "200mbit"; "none": no limit.
        compute: "emulated" or "language".
        strategies: the lines of the result.
        learners: number of machines.
        seconds: per case; one of local-sgd lasts at least `ROUNDS` rounds.
        parameters: of the emulated model.
        step_s: of the emulated model.
        every: local steps of local-sgd.
        slow: how many times slower learner 0 is.
        data: the text of the language model.
        seed: of the language model's first weights and of its samples.
    """

    rates: Sequence[str]
    compute: str = "emulated"
    strategies: Sequence[Strategy] = STRATEGIES
    learners: int = 4
    seconds: float = 30.0
    parameters: int = 10_000_000
    step_s: float = 0.2
    every: int = 50
    slow: float = 1.0
    data: str = ""
    seed: int = 0

    def case(self, strategy: Strategy) -> dict[str, Any]:
        """As the workers take it."""
        options, least_steps = dict(strategy.options), 0
        if strategy.name in registry.STRATEGIES and registry.takes_option(strategy.name, "every"):
            options["every"], least_steps = self.every, ROUNDS * self.every
        named = {"strategy": strategy.name, "options": options, "least_steps": least_steps}
        kept = ("compute", "seconds", "parameters", "step_s", "slow", "data", "seed")
        return named | {name: getattr(self, name) for name in kept}


@dataclass(frozen=True)
class Row:
    """One strategy at one rate, with one seed.

    Attributes:
        rate: of every link.
        strategy: its label.
        steps_per_s: of all learners together.
        bytes_per_step: bytes that a machine sends in one of its own steps.
        losses: language: (seconds, validation loss of the mean model), at equal times.
        ratio_to_none: steps_per_s divided by steps_per_s without communication; None if that was not measured.
        ddp_loss_s: language: seconds until the loss that DDP has at its end; None if it was not reached.
        seed: of the language model.
    """

    rate: str
    strategy: str
    steps_per_s: float
    bytes_per_step: float
    losses: Sequence[tuple[float, float]] = ()
    ratio_to_none: float | None = None
    ddp_loss_s: float | None = None
    seed: int = 0


def run(settings: Settings, progress: Callable[[str, str], None] = lambda rate, strategy: None) -> list[Row]:
    """Measure every strategy at every rate.

    Raises RoundelayError without root, if there is no text for the language model, or if a learner process ends early.
    """
    if settings.compute == "language":
        find_text(settings.data)
    rows = []
    with machines(settings.learners) as hosts, tempfile.TemporaryDirectory() as folder:
        for rate in settings.rates:
            for host in hosts:
                shape(host, None if rate == "none" else rate)
            rows += _measure_rate(settings, rate, hosts, Path(folder), progress)
    return compared(rows)


def _measure_rate(
    settings: Settings, rate: str, hosts: list[Machine], folder: Path, progress: Callable[[str, str], None]
) -> list[Row]:
    cases = [settings.case(strategy) for strategy in settings.strategies]
    plan = json.dumps({"cases": cases, "folder": str(folder), "rate": rate})
    measured: list[list[dict[str, float]]] = []
    with _learners(hosts, ["-m", "roundelay.bench.network_worker", plan]) as processes:
        results = processes[0].stdout
        assert results is not None
        for strategy in settings.strategies:
            line = results.readline()
            if not line:
                raise RoundelayError(
                    f"a learner process ended while it measured {strategy.label} at {rate}; its error is above"
                )
            measured.append(json.loads(line))
            progress(rate, strategy.label)
    losses: list[list[tuple[float, float]]] = [[] for _ in measured]
    if settings.compute == "language":
        losses = [_losses(settings, folder / f"{rate}-{number}") for number in range(len(measured))]
    labels = [strategy.label for strategy in settings.strategies]
    return [_row(rate, *each, settings.seed) for each in zip(labels, measured, losses, strict=True)]


def _row(
    rate: str, label: str, learners: Sequence[Mapping[str, float]], losses: list[tuple[float, float]], seed: int
) -> Row:
    return Row(
        rate,
        label,
        steps_per_s=sum(learner["steps"] / learner["seconds"] for learner in learners),
        bytes_per_step=sum(learner["bytes"] for learner in learners) / sum(learner["steps"] for learner in learners),
        losses=losses,
        seed=seed,
    )


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows, each compared with no communication and with DDP at the same rate and seed, unless that was done before."""
    others = {(row.rate, row.seed, row.strategy): row for row in rows}
    return [_compared(row, *(others.get((row.rate, row.seed, name)) for name in ("none", "ddp"))) for row in rows]


def _compared(row: Row, free: Row | None, ddp: Row | None) -> Row:
    ratio, seconds = row.ratio_to_none, row.ddp_loss_s
    if ratio is None and free:
        ratio = row.steps_per_s / free.steps_per_s
    if seconds is None and ddp and ddp.losses:
        seconds = time_to(ddp.losses[-1][1], row.losses)
    return replace(row, ratio_to_none=ratio, ddp_loss_s=seconds)


def time_to(target: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """The time at which a curve of (seconds, loss) first reaches the target, linear between its points; None if never.

    >>> time_to(2.0, [(10.0, 3.0), (20.0, 1.0)])
    15.0
    """
    before: tuple[float, float] | None = None
    for seconds, loss in curve:
        if loss <= target:
            if before is None or before[1] <= loss:
                return seconds
            return before[0] + (seconds - before[0]) * (before[1] - target) / (before[1] - loss)
        before = seconds, loss
    return None


def _losses(settings: Settings, snapshots: Path) -> list[tuple[float, float]]:
    """Validation losses of the mean models, from the snapshots that the learners have saved."""
    import torch
    from torch.nn.utils import vector_to_parameters

    from roundelay.bench.network_worker import SNAPSHOTS, language_task

    task = language_task(settings.data)
    pieces = len(task.text.splits["valid"]) // task.config.context
    module, curve = task.module().eval(), []
    for number in range(1, SNAPSHOTS + 1):
        replicas = [torch.load(f"{snapshots}-{number}-{rank}.pt") for rank in range(settings.learners)]
        vector_to_parameters(torch.stack(replicas).mean(0), module.parameters())
        with torch.no_grad():
            sums = task.evaluate(module, "valid", 0, max(1, pieces // EVALUATED_PIECES))
        curve.append((settings.seconds * number / SNAPSHOTS, sums["loss"] / sums["samples"]))
    return curve


def _learners(
    hosts: Sequence[Machine], arguments: Sequence[str]
) -> AbstractContextManager[list[subprocess.Popen[str]]]:
    """A Python process on each machine, as `running` gives them."""
    shared = {"WORLD_SIZE": str(len(hosts)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
    command = [sys.executable, *arguments]
    return running(
        (host.command(command), os.environ | shared | {"RANK": str(rank)}) for rank, host in enumerate(hosts)
    )
