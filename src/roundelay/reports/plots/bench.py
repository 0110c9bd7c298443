"""Bar charts of `roundelay bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundelay.reports.plots.figures import picture, strategy_colour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundelay.bench.throughput import Row


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Throughput of every strategy relative to no communication; one panel per model size."""
    sizes = sorted({row.parameters for row in rows})
    with picture(path, 1, len(sizes), size=(3.4 * len(sizes) + 3.0, 4.0), share_y=True) as (_, axes):
        for ax, parameters in zip(axes, sizes, strict=True):
            _panel(ax, [row for row in rows if row.parameters == parameters][::-1])


def _panel(ax: Any, shown: list[Row]) -> None:  # noqa: ANN401
    names = [row.name for row in shown]
    values = [row.ratio_to_none for row in shown]
    below = [row.ratio_to_none - row.ratio_to_none_range[0] for row in shown]
    above = [row.ratio_to_none_range[1] - row.ratio_to_none for row in shown]
    colours = [strategy_colour(row.strategy) for row in shown]
    ax.barh(names, values, xerr=(below, above), color=colours, error_kw={"elinewidth": 1, "ecolor": "#333333"})
    for position, value in enumerate(values):
        ax.text(0.02, position, f"{value:.2f}", va="center", color="white", fontsize=9)
    ax.axvline(1.0, color="#333333", linewidth=0.8)
    slow = f", one learner {shown[0].slow:g}× slower" if shown[0].slow > 1 else ""
    ax.set(
        xlabel="throughput / no communication",
        title=f"{shown[0].parameters / 1e6:g} M parameters{slow}",
        xlim=(0, None),
    )
    ax.grid(visible=False, axis="y")
