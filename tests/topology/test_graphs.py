"""Each named graph is the one its name says."""

from __future__ import annotations

import time
import tracemalloc

import networkx as nx
import numpy as np
import pytest

from roundelay.errors import TopologyError
from roundelay.topology import (
    Mixing,
    complete,
    exponential,
    hypercube,
    named,
    odd_even_ring,
    one_peer_exponential,
    random_matching,
    random_ring,
    ring,
    star,
    torus,
)

MILLION = 1_000_000


def graph_of(mixing: Mixing, round: int = 0) -> nx.Graph:
    graph = nx.Graph()
    graph.add_nodes_from(range(mixing.size))
    graph.add_edges_from((i, j) for i in range(mixing.size) for j in mixing.neighbours(i, round))
    return graph


def test_ring_is_the_cycle_with_thirds():
    assert ring(7).row(0) == pytest.approx({0: 1 / 3, 1: 1 / 3, 6: 1 / 3})
    assert nx.is_isomorphic(graph_of(ring(7)), nx.cycle_graph(7))


def test_an_asynchronous_ring_calls_successor_and_predecessor_in_turn():
    assert [ring(8).partner(3, round) for round in range(4)] == [4, 2, 4, 2]


def test_an_asynchronous_random_ring_calls_its_successor_so_no_learner_is_called_twice_in_a_round():
    mixing = random_ring(16, seed=2)
    for round in range(5):
        assert sorted(mixing.partner(rank, round) for rank in range(16)) == list(range(16))


def test_random_ring_is_a_ring_over_a_fresh_permutation_each_round():
    mixing = random_ring(12, seed=5)
    rounds = [graph_of(mixing, round) for round in range(6)]
    assert all(nx.is_isomorphic(graph, nx.cycle_graph(12)) for graph in rounds)
    assert len({frozenset(map(frozenset, graph.edges)) for graph in rounds}) == 6


def test_random_ring_depends_on_its_seed():
    assert (random_ring(12, seed=1).matrix(3) != random_ring(12, seed=2).matrix(3)).any()


def test_complete_is_the_mean():
    np.testing.assert_allclose(complete(6).matrix(), np.full((6, 6), 1 / 6))


def test_star_has_learner_0_in_the_middle():
    assert nx.is_isomorphic(graph_of(star(6)), nx.star_graph(5))
    assert star(6).neighbours(0) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(("size", "shape"), [(12, (3, 4)), (16, (4, 4)), (30, (5, 6)), (10, (2, 5))])
def test_torus_takes_the_squarest_shape(size, shape):
    assert nx.is_isomorphic(graph_of(torus(size)), nx.grid_2d_graph(*shape, periodic=True))


def test_a_torus_of_a_prime_number_is_a_ring():
    assert nx.is_isomorphic(graph_of(torus(13)), nx.cycle_graph(13))


@pytest.mark.parametrize("bits", range(1, 6))
def test_hypercube_is_the_hypercube(bits):
    assert nx.is_isomorphic(graph_of(hypercube(2**bits)), nx.hypercube_graph(bits))
    assert all(
        (rank ^ peer).bit_count() == 1 for rank in range(2**bits) for peer in hypercube(2**bits).neighbours(rank)
    )


def test_exponential_has_neighbours_at_powers_of_two_both_ways():
    assert exponential(20).neighbours(0) == (1, 2, 4, 8, 12, 16, 18, 19)
    np.testing.assert_allclose(exponential(5).matrix(), complete(5).matrix())


def test_one_peer_exponential_pairs_i_with_i_xor_2_to_the_k():
    mixing = one_peer_exponential(16)
    assert mixing.period == 4
    assert all(mixing.neighbours(i, k) == (i ^ (1 << k % 4),) for i in range(16) for k in range(9))


@pytest.mark.parametrize("builder", [hypercube, one_peer_exponential])
def test_graphs_of_powers_of_two_refuse_12_learners_and_name_the_way_out(builder):
    with pytest.raises(TopologyError, match=r"power of two learners, got 12; base-graph works for any number"):
        builder(12)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9])
def test_odd_even_ring_uses_every_edge_of_the_ring_and_one_peer_a_round(size):
    mixing = odd_even_ring(size)
    union = nx.compose_all(graph_of(mixing, round) for round in range(mixing.period))
    assert nx.is_isomorphic(union, nx.cycle_graph(size) if size > 2 else nx.path_graph(2))
    assert max(mixing.degrees(round).max() for round in range(mixing.period)) == 1


def test_an_odd_odd_even_ring_lets_each_learner_rest_once_a_period():
    mixing = odd_even_ring(9)
    resting = [rank for round in range(9) for rank in range(9) if not mixing.neighbours(rank, round)]
    assert sorted(resting) == list(range(9))


@pytest.mark.parametrize(("size", "resting"), [(10, 0), (11, 1)])
def test_random_matching_pairs_all_learners_but_at_most_one(size, resting):
    mixing = random_matching(size, seed=1)
    for round in range(5):
        degrees = mixing.degrees(round)
        assert set(degrees.tolist()) <= {0, 1}
        assert (degrees == 0).sum() == resting


@pytest.mark.parametrize(
    "name", ["ring", "random-ring", "torus", "exponential", "odd-even-ring", "random-matching", "base-graph"]
)
def test_a_row_among_a_million_learners_is_cheap(name):
    mixing = named(name, MILLION, seed=1)
    mixing.row(0, 0)
    tracemalloc.start()
    row = mixing.row(123_456, 7)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    seconds = []
    for round in range(100):
        start = time.perf_counter()
        mixing.row(777_777, 8 + round)
        seconds.append(time.perf_counter() - start)
    assert sum(row.values()) == pytest.approx(1)
    assert peak_bytes < 32_000
    assert np.median(seconds) < 1e-3


def test_rounds_do_not_depend_on_the_order_of_the_questions():
    forwards, backwards = random_ring(MILLION, seed=9), random_ring(MILLION, seed=9)
    there = [forwards.row(5, round) for round in range(100)]
    back = [backwards.row(5, round) for round in reversed(range(100))]
    assert there == back[::-1]
