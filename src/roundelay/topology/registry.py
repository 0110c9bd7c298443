"""Topologies by name, from a file or from `module:function`, for any number of learners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from roundelay import plugins
from roundelay.errors import RoundelayError, TopologyError, unknown
from roundelay.topology import graphs
from roundelay.topology.base_graph import base_graph
from roundelay.topology.files import READERS, mixing_from_file
from roundelay.topology.mixing import Mixing

Family = Callable[[int], Mixing]
"""A topology for any number of learners: size -> Mixing. It raises TopologyError for a size that it does not support."""

TOPOLOGIES: dict[str, Callable[[int, int, int], Mixing]] = {
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


def family(topology: str | Mixing | Family, *, seed: int = 0, degree: int = 1) -> Family:
    """A topology for any number of learners.

    Args:
        topology: a name of `TOPOLOGIES`; a graph or matrix file; `module:function`, where function(size) returns a Mixing;
            such a function itself; or one Mixing, which supports its own size only.
        seed: seed of the random topologies.
        degree: degree of base-graph.

    Raises TopologyError for any other value, for an unknown name, or for a file or module that cannot be read.

    >>> family("random-ring", seed=3)(8), family(graphs.ring)(5)
    (random-ring(8), ring(5))
    """
    if isinstance(topology, Mixing):
        return OneSize(topology)
    if callable(topology):
        return topology
    if not isinstance(topology, str):
        raise TopologyError(f"a topology is a name, a file, module:function, a function or a Mixing, got {topology!r}")
    if Path(topology).suffix in READERS:
        return OneSize(mixing_from_file(Path(topology)))
    if plugins.is_path(topology):
        return FromPlugin(topology)
    if topology not in TOPOLOGIES:
        raise TopologyError(
            unknown("topology", topology, TOPOLOGIES) + f"; or a file ({', '.join(READERS)}), or module:function"
        )
    return Named(topology, seed, degree)


def named(topology: str, size: int, seed: int = 0, degree: int = 1) -> Mixing:
    """The mixing of `size` learners on a topology; see `family` for its arguments and errors.

    >>> named("random-ring", 8, seed=3)
    random-ring(8)
    """
    return family(topology, seed=seed, degree=degree)(size)


def every(size: int, seed: int = 0, degree: int = 1) -> tuple[list[Mixing], dict[str, str]]:
    """All built-in topologies that support `size` learners, and for each of the others the reason why it does not."""
    possible: list[Mixing] = []
    refused: dict[str, str] = {}
    for name in TOPOLOGIES:
        try:
            possible.append(named(name, size, seed, degree))
        except TopologyError as error:
            refused[name] = str(error)
    return possible, refused


# Families are objects, not closures, so that a strategy can be pickled.


@dataclass(frozen=True)
class Named:
    """A topology of `TOPOLOGIES`."""

    name: str
    seed: int
    degree: int

    def __call__(self, size: int) -> Mixing:
        """The mixing for `size` learners."""
        return TOPOLOGIES[self.name](size, self.seed, self.degree)


@dataclass(frozen=True)
class OneSize:
    """The family of a single mixing: it supports one number of learners only."""

    mixing: Mixing

    def __call__(self, size: int) -> Mixing:
        """The mixing. Raises TopologyError for any other size."""
        if size != self.mixing.size:
            raise TopologyError(
                f"{self.mixing!r} is for {self.mixing.size} learners, but there are {size}; use a topology that "
                "supports any number, such as random-ring"
            )
        return self.mixing


@dataclass(frozen=True)
class FromPlugin:
    """A topology by `module:function`. Raises TopologyError if there is no such function."""

    path: str

    def __post_init__(self) -> None:
        self._function()

    def _function(self) -> Family:
        function = plugins.load(self.path, "topology", TopologyError)
        if not callable(function):
            raise TopologyError(
                f"the topology '{self.path}' must be a function that takes the number of learners and returns a Mixing"
            )
        return cast(Family, function)

    def __call__(self, size: int) -> Mixing:
        """The mixing for `size` learners. Raises TopologyError if the function raises, or returns anything else."""
        try:
            mixing = self._function()(size)
        except RoundelayError:
            raise
        except Exception as error:  # an error in the user's own function
            raise TopologyError(
                f"the topology '{self.path}' failed for {size} learners: {plugins.located(error)}"
            ) from error
        if not isinstance(mixing, Mixing) or mixing.size != size:
            raise TopologyError(f"the topology '{self.path}' must return a Mixing of {size} learners, got {mixing!r}")
        return mixing
