"""Pictures of topologies: the graph itself, and spectral gaps against the number of learners."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from roundelay.errors import TopologyError
from roundelay.plots.figures import new_figure, save
from roundelay.topology import TOPOLOGIES, Mixing, named, spectral_gap
from roundelay.topology.cayley import CayleyMixing
from roundelay.topology.mixing import DENSE_LIMIT

MOST_DRAWN = 256
ROUNDS_DRAWN = 4
_MARKERS = "osD^vP*XhpH"


def draw_topology(mixing: Mixing, path: Path) -> None:
    """Draw the graph; of a changing topology its first rounds side by side. Learners keep their places."""
    if mixing.size > MOST_DRAWN:
        raise TopologyError(f"a drawing shows at most {MOST_DRAWN} learners, got {mixing.size}; draw a smaller one")
    rounds = ROUNDS_DRAWN if mixing.period is None else min(mixing.period, 2 * ROUNDS_DRAWN)
    columns = min(rounds, ROUNDS_DRAWN)
    rows = math.ceil(rounds / columns)
    figure, axes = new_figure(rows, columns, size=(3.4 * columns + 0.4, 3.7 * rows))
    places = _places(mixing)
    for round, ax in enumerate(axes):
        ax.set_axis_off()
        if round < rounds:
            _draw_round(mixing, round, places, ax)
    figure.suptitle(f"{mixing.name}, {mixing.size} learners")
    save(figure, path)


def _places(mixing: Mixing) -> dict[int, tuple[float, float]]:
    if mixing.name == "star":
        places = nx.circular_layout(range(1, mixing.size))
        return {0: (0.0, 0.0), **places}
    if isinstance(mixing, CayleyMixing) and mixing.name == "torus":
        columns = mixing.shape[1]
        return {rank: (float(rank % columns), -float(rank // columns)) for rank in range(mixing.size)}
    angles = [math.pi / 2 - 2 * math.pi * rank / mixing.size for rank in range(mixing.size)]
    return {rank: (math.cos(angle), math.sin(angle)) for rank, angle in enumerate(angles)}


def _draw_round(mixing: Mixing, round: int, places: dict[int, tuple[float, float]], ax: Any) -> None:  # noqa: ANN401
    graph = nx.Graph()
    graph.add_nodes_from(range(mixing.size))
    graph.add_edges_from((i, j) for i in range(mixing.size) for j in mixing.neighbours(i, round))
    small = mixing.size <= 32
    nx.draw_networkx_edges(graph, places, ax=ax, edge_color="#4477aa", width=1.6 if small else 0.7)
    nx.draw_networkx_nodes(graph, places, ax=ax, node_color="#eeeeee", edgecolors="#333333", node_size=240 if small else 18)
    if small:
        nx.draw_networkx_labels(graph, places, ax=ax, font_size=8)
    ax.set_aspect("equal")
    if mixing.period != 1:
        ax.set_title(f"round {round}")


def plot_gaps(most: int, path: Path, *, seed: int = 0, degree: int = 1) -> None:
    """Spectral gap against the number of learners up to `most`, every topology, both axes logarithmic."""
    figure, (ax,) = new_figure(size=(8.5, 5.2))
    for marker, name in zip(_MARKERS, TOPOLOGIES, strict=True):
        sizes, gaps = [], []
        for size in _sizes(most):
            try:
                gap = spectral_gap(named(name, size, seed, degree))
            except TopologyError:
                continue
            sizes.append(size)
            gaps.append(gap)
        ax.plot(sizes, gaps, marker=marker, markersize=5, linewidth=1.4, label=name, alpha=0.85)
    ax.set(xscale="log", yscale="log", xlabel="learners n", ylabel="spectral gap per round")
    ax.set_title("The fixed ring's gap falls as 1/n²; permuting the ring each round keeps it")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def _sizes(most: int) -> list[int]:
    """Powers of two (so that every topology has points), and `most` itself; dense work bounds the largest."""
    top = min(most, DENSE_LIMIT)
    powers = 2 ** np.arange(2, int(math.log2(max(top, 4))) + 1)
    return sorted({*powers.tolist(), top})
