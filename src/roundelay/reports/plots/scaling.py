"""Plots of predicted scaling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roundelay.papers.claim import Line, Panel
from roundelay.planning import ScalingPoint
from roundelay.reports.plots.reproduce import plot_panels


def plot_scaling(points: Sequence[ScalingPoint], path: Path) -> None:
    """Plot speed-up and efficiency of every strategy against the number of learners."""
    by_strategy: dict[str, list[ScalingPoint]] = {}
    for point in points:
        by_strategy.setdefault(point.strategy, []).append(point)
    ordered = sorted(by_strategy.items())  # a strategy, then its groups
    learners = {name: [point.learners for point in own] for name, own in by_strategy.items()}
    speedups = [Line(name, learners[name], [[point.speedup for point in own]]) for name, own in ordered]
    parts = [Line(name, learners[name], [[point.efficiency for point in own]]) for name, own in ordered]
    every = sorted({point.learners for point in points})
    speedups.append(Line("ideal", every, [every], dashed=True))
    parts.append(Line("ideal", every, [[1.0] * len(every)], dashed=True))
    plot_panels(
        [
            Panel("speed-up", "learners", "times one learner", speedups, "xy"),
            Panel("efficiency", "learners", "speed-up / learners", parts, "x"),
        ],
        path,
    )
