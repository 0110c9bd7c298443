"""Topologies by name."""

from __future__ import annotations

import pytest

from roundelay.errors import TopologyError
from roundelay.topology import TOPOLOGIES, every, named


def test_a_topology_knows_its_own_name(topology):
    assert named(topology, 4).name == topology


def test_seed_and_degree_reach_those_that_have_them():
    assert named("random-ring", 9, seed=3).seed == 3
    assert named("base-graph", 27, degree=2).period == 3


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(TopologyError, match="unknown topology 'random_ring'; did you mean 'random-ring'"):
        named("random_ring", 4)


def test_every_topology_or_the_reason_why_not():
    possible, refused = every(12)
    assert set(refused) == {"hypercube", "one-peer-exponential"}
    assert {mixing.name for mixing in possible} | set(refused) == set(TOPOLOGIES)
    assert every(16)[1] == {}
