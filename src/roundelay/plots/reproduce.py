"""Pictures of experiments: panels of lines, one faint line a seed and their mean in full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.plots.figures import picture
from roundelay.simulation.claims.claim import Panel

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999", "#000000")
COLUMNS = 3


def plot_panels(panels: Sequence[Panel], path: Path) -> None:
    """All panels in rows of at most three."""
    columns = min(COLUMNS, len(panels)) if len(panels) != 4 else 2
    rows = math.ceil(len(panels) / columns)
    with picture(path, rows, columns, size=(4.6 * columns, 3.7 * rows)) as (_, axes):
        for ax, panel in zip(axes, panels, strict=False):
            _draw(ax, panel)
        for ax in axes[len(panels) :]:
            ax.set_visible(False)


def _draw(ax: Any, panel: Panel) -> None:  # noqa: ANN401
    for colour, line in zip(_COLOURS, panel.lines, strict=False):
        ys = np.asarray(line.ys, dtype=float)
        logarithmic = "y" in panel.log
        middle = np.exp(np.log(ys).mean(axis=0)) if logarithmic and (ys > 0).all() else ys.mean(axis=0)
        few = len(line.x) <= 12 and not line.dashed
        style = {"linestyle": "--" if line.dashed else "-", "marker": "o" if few else None, "markersize": 4}
        ax.plot(line.x, middle, color=colour, label=line.label, linewidth=1.6, zorder=3, **style)
        if len(ys) > 1 and not line.dashed:
            ax.fill_between(line.x, ys.min(axis=0), ys.max(axis=0), color=colour, alpha=0.18, linewidth=0)
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    if "x" in panel.log:
        ax.set_xscale("log")
    if "y" in panel.log:
        ax.set_yscale("log")
    ax.legend(fontsize=8)
