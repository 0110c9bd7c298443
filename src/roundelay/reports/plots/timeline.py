"""Pictures of who computes and who waits: the real strategies on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from roundelay.clock import Process, VirtualClock
from roundelay.reports.plots.figures import picture
from roundelay.simulation import VirtualLearner
from roundelay.strategies import Strategy
from roundelay.transport import SimulatedNetwork

Interval = tuple[float, float]


def timeline(strategy_of: Callable[[], Strategy], step_s: list[float], until_s: float) -> list[list[Interval]]:
    """When each learner computes, up to virtual time `until_s`; learner i's steps take step_s[i]."""
    clock = VirtualClock()
    network = SimulatedNetwork(clock, len(step_s), latency_s=0.05)
    computing: list[list[Interval]] = [[] for _ in step_s]

    def learner(rank: int) -> Process:
        module = nn.Linear(1, 1)

        def gradient(step: int) -> None:
            computing[rank].append((clock.now(), clock.now() + step_s[rank]))
            for weight in module.parameters():
                weight.grad = torch.zeros_like(weight)

        return VirtualLearner(
            module,
            torch.optim.SGD(module.parameters(), lr=0.0),
            strategy_of(),
            network.transports[rank],
            gradient,
            lambda step: step_s[rank],
        ).process(steps=int(until_s / min(step_s)) + 2)

    for rank in range(len(step_s)):
        clock.spawn(learner(rank), f"learner {rank}")
    clock.run(until=until_s)
    return computing


def plot_timeline(strategy_of: Callable[[], Strategy], step_s: list[float], path: Path, until_s: float = 12.0) -> None:
    """One row a learner: a bar is a step's computation, a gap is waiting."""
    rows = timeline(strategy_of, step_s, until_s)
    with picture(path, size=(8.0, 0.42 * len(rows) + 0.9)) as (_, (ax,)):
        for rank, bars in enumerate(rows):
            spans = [(begin, min(end, until_s) - begin) for begin, end in bars]
            colour = "#cc6677" if step_s[rank] > min(step_s) else "#4477aa"
            ax.broken_barh(spans, (rank - 0.36, 0.72), facecolors=colour, edgecolors="white", linewidth=1.2)
            ax.text(until_s + 0.1, rank, f"{sum(end <= until_s for _, end in bars)} steps", va="center")
        ax.set(
            yticks=range(len(rows)),
            yticklabels=[f"learner {rank}" for rank in range(len(rows))],
            xlabel="time in usual steps",
        )
        ax.set(xlim=(0, until_s), ylim=(len(rows) - 0.4, -0.6))
        ax.grid(visible=False)
