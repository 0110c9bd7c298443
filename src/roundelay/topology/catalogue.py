"""The topologies by name, as the command line and recipes know them."""

from __future__ import annotations

from collections.abc import Callable

from roundelay.errors import TopologyError, unknown
from roundelay.topology import graphs
from roundelay.topology.base_graph import base_graph
from roundelay.topology.mixing import Mixing

Builder = Callable[[int, int, int], Mixing]

TOPOLOGIES: dict[str, Builder] = {
    "ring": lambda size, seed, degree: graphs.ring(size),
    "random-ring": lambda size, seed, degree: graphs.random_ring(size, seed),
    "complete": lambda size, seed, degree: graphs.complete(size),
    "star": lambda size, seed, degree: graphs.star(size),
    "torus": lambda size, seed, degree: graphs.torus(size),
    "hypercube": lambda size, seed, degree: graphs.hypercube(size),
    "exponential": lambda size, seed, degree: graphs.exponential(size),
    "one-peer-exponential": lambda size, seed, degree: graphs.one_peer_exponential(size),
    "odd-even-ring": lambda size, seed, degree: graphs.odd_even_ring(size),
    "random-matching": lambda size, seed, degree: graphs.random_matching(size, seed),
    "base-graph": lambda size, seed, degree: base_graph(size, degree),
}


def named(name: str, size: int, seed: int = 0, degree: int = 1) -> Mixing:
    """The topology called `name`; `seed` matters to the random ones, `degree` to base-graph.

    Raises TopologyError for an unknown name or a size that this topology cannot have.

    >>> named("random-ring", 8, seed=3)
    random-ring(8)
    """
    if name not in TOPOLOGIES:
        raise TopologyError(unknown("topology", name, TOPOLOGIES))
    return TOPOLOGIES[name](size, seed, degree)


def every(size: int, seed: int = 0, degree: int = 1) -> tuple[list[Mixing], dict[str, str]]:
    """All topologies that `size` learners can have, and why the others cannot."""
    possible, refused = [], {}
    for name in TOPOLOGIES:
        try:
            possible.append(named(name, size, seed, degree))
        except TopologyError as error:
            refused[name] = str(error)
    return possible, refused
