"""Pictures of topologies: the graph itself, and spectral gaps against the number of learners."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from roundelay.errors import TopologyError
from roundelay.reports.plots.figures import picture
from roundelay.topology import TOPOLOGIES, Mixing, named, spectral_gap
from roundelay.topology.cayley import CayleyMixing

MOST_DRAWN = 256
MOST_LABELLED = 32
INCHES = 2.7  # of one round; four rounds side by side can then be read on a page
ROUNDS_DRAWN = 4
STUB = 0.42  # drawn length of an edge that wraps around, in distances between neighbours

Point = tuple[float, float]

# Colours that colour-blind readers can tell apart (Paul Tol's muted set and black), each with its own marker.
_COLOUR_AND_MARKER = {
    "ring": ("#cc6677", "o"),
    "random-ring": ("#332288", "s"),
    "complete": ("#000000", "o"),
    "star": ("#ddcc77", "*"),
    "torus": ("#117733", "P"),
    "hypercube": ("#88ccee", "v"),
    "exponential": ("#882255", "^"),
    "one-peer-exponential": ("#44aa99", "D"),
    "odd-even-ring": ("#999933", "X"),
    "random-matching": ("#aa4499", "h"),
    "base-graph": ("#ee7733", "s"),
}


def topology_colour(name: str) -> str | None:
    """The colour of a topology in all pictures; None if `name` is no topology."""
    return _COLOUR_AND_MARKER[name][0] if name in _COLOUR_AND_MARKER else None


def draw_topology(mixing: Mixing, path: Path) -> None:
    """Draw the graph; of a changing topology the first rounds side by side. A learner is at the same point in all rounds.

    Raises TopologyError if there are too many learners to see, MissingExtraError without matplotlib.
    """
    if mixing.size > MOST_DRAWN:
        raise TopologyError(
            f"a drawing shows at most {MOST_DRAWN} learners, got {mixing.size}; draw a smaller topology"
        )
    rounds = ROUNDS_DRAWN if mixing.period is None else min(mixing.period, 2 * ROUNDS_DRAWN)
    rows = math.ceil(rounds / ROUNDS_DRAWN)
    columns = math.ceil(rounds / rows)
    points = _points(mixing)
    with picture(path, rows, columns, size=(INCHES * columns + 0.3, (INCHES + 0.3) * rows)) as (figure, axes):
        for round, ax in enumerate(axes):
            ax.set_axis_off()
            if round < rounds:
                _draw_round(mixing, round, points, ax)
        figure.suptitle(f"{mixing.name}, {mixing.size} learners")


def _points(mixing: Mixing) -> dict[int, Point]:
    if _columns(mixing):
        return {rank: (float(rank % _columns(mixing)), -float(rank // _columns(mixing))) for rank in range(mixing.size)}
    around = range(1, mixing.size) if mixing.name == "star" else range(mixing.size)
    angles = {rank: math.pi / 2 - 2 * math.pi * turn / len(around) for turn, rank in enumerate(around)}
    circle = {rank: (math.cos(angle), math.sin(angle)) for rank, angle in angles.items()}
    return {0: (0.0, 0.0)} | circle


def _columns(mixing: Mixing) -> int:
    """Columns of a torus, which is drawn as a grid; 0 for every other topology, which is drawn as a circle."""
    if mixing.name == "torus" and isinstance(mixing, CayleyMixing) and mixing.shape[0] > 1:
        return mixing.shape[1]
    return 0


def _draw_round(mixing: Mixing, round: int, points: dict[int, Point], ax: Any) -> None:  # noqa: ANN401
    edges = {(i, j) for i in range(mixing.size) for j in mixing.neighbours(i, round) if i < j}
    wrapped = {(i, j) for i, j in edges if _columns(mixing) and math.dist(points[i], points[j]) > 1}
    small = mixing.size <= MOST_LABELLED
    line = {"color": "#4477aa", "linewidth": 1.6 if small else 0.7, "zorder": 1}
    for i, j in sorted(edges - wrapped):
        ax.plot(*zip(points[i], points[j], strict=True), **line)
    for i, j in sorted(wrapped):
        for end, other in ((points[i], points[j]), (points[j], points[i])):
            away = [a + STUB * (a - b) / math.dist(end, other) for a, b in zip(end, other, strict=True)]
            ax.plot(*zip(end, away, strict=True), linestyle=":", **line)
    xs, ys = zip(*(points[rank] for rank in range(mixing.size)), strict=True)
    area, font = (100, 6) if mixing.size > MOST_LABELLED // 2 else (190, 8)
    ax.scatter(xs, ys, s=area if small else 18, color="#eeeeee", edgecolors="#333333", zorder=2)
    if small:
        for rank in range(mixing.size):
            ax.text(*points[rank], str(rank), fontsize=font, ha="center", va="center")
    ax.margins(0.12)
    ax.set_aspect("equal")
    if mixing.period != 1:
        ax.set_title(f"round {round}")
    elif wrapped:
        ax.set_title("dotted edges wrap around", fontsize=8)


def plot_gaps(most: int, path: Path, *, seed: int = 0, degree: int = 1) -> None:
    """Plot the spectral gap of every topology against the number of learners, up to `most`; both axes are logarithmic."""
    curves = {name: _gaps(name, _sizes(most), seed, degree) for name in TOPOLOGIES}
    ranked = sorted((name for name in curves if curves[name]), key=lambda name: -list(curves[name].values())[-1])
    with picture(path, size=(8.6, 5.2)) as (_, (ax,)):
        for position, name in enumerate(ranked):
            colour, marker = _COLOUR_AND_MARKER[name]
            # Exact topologies all have gap 1: later curves are smaller and thinner, so that earlier ones stay visible.
            ax.plot(
                list(curves[name]),
                list(curves[name].values()),
                label=name,
                color=colour,
                marker=marker,
                markerfacecolor="none" if position < len(ranked) / 2 else colour,
                markersize=max(11 - 1.8 * position, 5),
                linewidth=max(3.2 - 0.6 * position, 1.4),
            )
        ax.set(xscale="log", yscale="log", xlabel="learners n", ylabel="spectral gap per round")
        ax.set_xticks(_sizes(most), [str(size) for size in _sizes(most)])
        ax.minorticks_off()
        ax.set_title("The fixed ring's gap falls as 1/n²; permuting the ring each round keeps it")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _gaps(name: str, sizes: list[int], seed: int, degree: int) -> dict[int, float]:
    """The gap at every size that this topology supports."""
    gaps = {}
    for size in sizes:
        try:
            gaps[size] = spectral_gap(named(name, size, seed, degree))
        except TopologyError:
            continue
    return gaps


def _sizes(most: int) -> list[int]:
    """Powers of two, which every topology supports, and `most` itself."""
    return sorted({most, *(1 << bit for bit in range(2, most.bit_length()))} - {0})
