"""Pictures of when learners compute and when they wait: the strategies themselves on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roundelay.clock import VirtualClock
from roundelay.reports.plots.figures import picture
from roundelay.simulation.learners import step_starts
from roundelay.strategies import Strategy
from roundelay.transport import SimulatedNetwork

LATENCY_S = 0.05
Interval = tuple[float, float]


def timeline(strategy_of: Callable[[], Strategy], step_s: list[float], until_s: float) -> list[list[Interval]]:
    """For each learner, begin and end of the compute time of its steps that begin before `until_s`.

    A step of learner i computes for step_s[i] seconds.
    """
    network = SimulatedNetwork(VirtualClock(), len(step_s), latency_s=LATENCY_S)
    enough = int(until_s / min(step_s)) + 2  # steps, so that the fastest learner trains past `until_s`
    starts = step_starts(network, strategy_of, step_s, enough)
    return [
        [(begin, begin + seconds) for begin in begins if begin <= until_s]
        for begins, seconds in zip(starts, step_s, strict=True)
    ]


def plot_timeline(strategy_of: Callable[[], Strategy], step_s: list[float], path: Path, until_s: float = 12.0) -> None:
    """Draw one row for each learner: a bar is the compute time of a step, a gap is waiting."""
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
