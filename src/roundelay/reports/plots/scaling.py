"""Pictures of predicted scaling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roundelay.papers.claim import Line, Panel
from roundelay.planning.scaling import Prediction
from roundelay.reports.plots.reproduce import plot_panels


def plot_scaling(rows: Sequence[Prediction], path: Path) -> None:
    """Speed-up and efficiency of every strategy over the number of learners."""
    learners = sorted({row.learners for row in rows})
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    by = {(row.strategy, row.learners): row for row in rows}
    speedups = [Line(name, learners, [[by[name, n].speedup for n in learners]]) for name in strategies]
    parts = [Line(name, learners, [[by[name, n].efficiency for n in learners]]) for name in strategies]
    ideal = Line("ideal", learners, [learners], dashed=True)
    plot_panels(
        [
            Panel("speed-up", "learners", "times one learner", [*speedups, ideal], "xy"),
            Panel("efficiency", "learners", "speed-up / learners", parts, "x"),
        ],
        path,
    )
