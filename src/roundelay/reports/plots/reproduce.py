"""Plots of experiments: lines are means over seeds, and bands reach from the smallest to the largest value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.papers.claim import Line, Panel
from roundelay.reports.plots.figures import COLOURS, DASHES, picture, strategy_colour
from roundelay.reports.plots.topology import topology_colour

_OTHER_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999", "#000000")
_TOPOLOGIES = {"fixed ring": "ring", "full averaging": "complete"}  # whose labels are not their names
COLUMNS = 2  # more would be too small to read on a page
FEW_TICKS, LONGEST_TICK = 7, 5
WIDE, VERY_WIDE = 300, 1e5  # largest / smallest value of a logarithmic axis
LEGEND_COLUMNS = 5
FEW_LINES = 5


def plot_panels(panels: Sequence[Panel], path: Path) -> None:
    """Draw all panels into `path`, in rows of at most two."""
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    shared = len({tuple(line.label for line in panel.lines) for panel in panels}) == 1 and len(panels) > 1
    with picture(path, rows, columns, size=(4.6 * columns, 3.7 * rows + 0.5 * shared)) as (figure, axes):
        for ax, panel in zip(axes, panels, strict=False):
            _draw(ax, panel)
            if not shared:
                _legend(ax, len(panel.lines))
        if shared:  # one legend below all panels
            handles, labels = axes[0].get_legend_handles_labels()
            ncols = math.ceil(len(labels) / math.ceil(len(labels) / LEGEND_COLUMNS))
            figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize=9)
        for ax in axes[len(panels) :]:
            ax.set_visible(False)


def _legend(ax: Any, lines: int) -> None:  # noqa: ANN401
    """A few labels go inside the axes, many below them."""
    if lines <= FEW_LINES:
        ax.legend(fontsize=8)
    else:
        ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _plain_ticks(axis: Any, at: Sequence[float]) -> None:  # noqa: ANN401
    """Put ticks at the values `at`; if there are none, at 1, 2 and 5 times powers of ten, and on a wide axis at powers of ten."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_view_interval()
    if at:
        axis.set_ticks(at)
        axis.set_ticks([], minor=True)
    elif high < WIDE * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 2, 3, 5, 7)))
    if high < VERY_WIDE * low:
        axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _measured_x(panel: Panel) -> list[float]:
    """The measured values of x, if they are few and short enough to be tick labels; else none."""
    values = sorted({x for line in panel.lines if not line.dashed for x in line.x})
    return values if len(values) <= FEW_TICKS and all(len(f"{x:g}") <= LONGEST_TICK for x in values) else []


def _looks(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Colour and dashes of each line. A strategy or a topology has its colour in all pictures; its variants differ in dashes."""
    colours: dict[str, str] = {}
    variants: dict[str, int] = {}
    looks = []
    for line in lines:
        known = line.beside or line.label
        unused = [each for each in _OTHER_COLOURS if each not in colours.values()] or _OTHER_COLOURS
        colour = colours.setdefault(known, _own_colour(known, line) or unused[0])
        before = variants.get(colour, 0)
        variants[colour] = before + (not line.beside)
        looks.append((colour, DASHES[before % len(DASHES)] if not line.dashed or before > 0 else DASHES[1]))
    return looks


def _own_colour(label: str, line: Line) -> str | None:
    """The colour of the strategy or the topology that a label begins with; None if it begins with neither."""
    name = label.partition(",")[0]
    if name.partition(" ")[0] in COLOURS:
        return strategy_colour(name)
    if found := topology_colour(_TOPOLOGIES.get(name, name.replace(" ", "-"))):
        return found
    return COLOURS["none"] if line.dashed and not line.beside else None


def _draw(ax: Any, panel: Panel) -> None:  # noqa: ANN401
    for line, (colour, dashes) in zip(panel.lines, _looks(panel.lines), strict=True):
        ys = np.asarray(line.ys, dtype=float)
        logarithmic = "y" in panel.log
        middle = np.exp(np.nanmean(np.log(ys), axis=0)) if logarithmic and np.nanmin(ys) > 0 else np.nanmean(ys, axis=0)
        few = len(line.x) <= 12 and not line.dashed
        style = {"linestyle": dashes, "marker": "o" if few else None, "markersize": 4}
        ax.plot(line.x, middle, color=colour, label=line.label, linewidth=1.6, zorder=3, **style)
        if len(ys) > 1 and not line.dashed:
            ax.fill_between(line.x, np.nanmin(ys, axis=0), np.nanmax(ys, axis=0), color=colour, alpha=0.18, linewidth=0)
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    for axis, scale, name in ((ax.xaxis, ax.set_xscale, "x"), (ax.yaxis, ax.set_yscale, "y")):
        if name in panel.log:
            scale("log")
            _plain_ticks(axis, _measured_x(panel) if name == "x" else [])
