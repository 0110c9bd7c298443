"""Which learners average with each other, and what theory says about it. Pure values: no process, no thread, no torch."""

from roundelay.topology.base_graph import base_graph
from roundelay.topology.graphs import (
    complete,
    exponential,
    hypercube,
    odd_even_ring,
    one_peer_exponential,
    random_matching,
    random_ring,
    ring,
    star,
    torus,
)
from roundelay.topology.matrix import from_graph, from_matrix
from roundelay.topology.mixing import Mixing
from roundelay.topology.registry import TOPOLOGIES, Family, every, family, named
from roundelay.topology.spectrum import Spectrum, spectral_gap, spectrum, stability_bound

__all__ = [
    "TOPOLOGIES",
    "Family",
    "Mixing",
    "Spectrum",
    "base_graph",
    "complete",
    "every",
    "exponential",
    "family",
    "from_graph",
    "from_matrix",
    "hypercube",
    "named",
    "odd_even_ring",
    "one_peer_exponential",
    "random_matching",
    "random_ring",
    "ring",
    "spectral_gap",
    "spectrum",
    "stability_bound",
    "star",
    "torus",
]
