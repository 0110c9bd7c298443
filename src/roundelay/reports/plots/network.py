"""The picture of `roundelay bench network`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from roundelay.reports.plots.figures import DASHES, picture, strategy_colour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundelay.bench.network import Row


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """One panel per rate: steps per second relative to no communication, or losses over time, a line per seed."""
    rates = list(dict.fromkeys(row.rate for row in rows))
    losses = any(row.losses for row in rows)
    width = 6.4 if losses else 2.6 * len(rates) + 2.0  # all bar charts have the labels of the first one
    with picture(path, 1, len(rates), size=(width, 4.0), share_y=not losses) as (_, axes):
        for ax, rate in zip(axes, rates, strict=True):
            shown = [row for row in rows if row.rate == rate]
            title = "no limit" if rate == "none" else rate
            if any(row.losses for row in shown):
                styles: dict[str, str] = {}
                dashes: Counter[str] = Counter()
                for row in shown:
                    colour, label = strategy_colour(row.strategy), None
                    if row.strategy not in styles:
                        label = row.strategy
                        styles[label] = DASHES[dashes[colour] % len(DASHES)]
                        dashes[colour] += 1
                    ax.plot(*zip(*row.losses, strict=True), styles[row.strategy], color=colour, label=label, lw=1.2)
                ax.set(xlabel="seconds", ylabel="validation loss of the mean model", title=title)
                ax.legend(fontsize=7)
            else:
                colours = [strategy_colour(row.strategy) for row in shown][::-1]
                names = [row.strategy for row in shown][::-1]
                ax.barh(names, [row.ratio_to_none for row in shown][::-1], color=colours)
                ax.set(xlabel="throughput / no communication", title=title)
