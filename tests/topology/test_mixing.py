"""What every mixing promises."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from roundelay.errors import TopologyError
from roundelay.topology import TOPOLOGIES, Mixing, from_graph, from_matrix, named, random_ring, ring
from roundelay.topology.mixing import RelabelledMixing

POWERS_OF_TWO_ONLY = ("hypercube", "one-peer-exponential")


@st.composite
def mixings(draw: st.DrawFn) -> Mixing:
    """Any topology by name, any size it can have, any seed and degree."""
    name = draw(st.sampled_from(sorted(TOPOLOGIES)))
    size = 2 ** draw(st.integers(0, 6)) if name in POWERS_OF_TWO_ONLY else draw(st.integers(1, 64))
    return named(name, size, seed=draw(st.integers(-(2**31), 2**63)), degree=draw(st.integers(1, 4)))


def assert_doubly_stochastic(W: np.ndarray) -> None:
    assert W.min() >= 0
    np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(W, W.T, atol=1e-15)


def test_every_round_of_every_topology_of_1_to_64_learners_is_symmetric_and_doubly_stochastic(topology, sizes):
    for size in sizes:
        mixing = named(topology, size, seed=size)
        for round in range(min(mixing.period or 3, 16)):
            W = mixing.matrix(round)
            assert W.shape == (size, size)
            assert_doubly_stochastic(W)


@given(mixings(), st.integers(0, 2**40))
@settings(max_examples=200)
def test_any_round_is_symmetric_and_doubly_stochastic(mixing, round):
    assert_doubly_stochastic(mixing.matrix(round))


@given(mixings(), st.integers(0, 2**40))
def test_neighbours_are_mutual(mixing, round):
    for rank in range(mixing.size):
        neighbours = mixing.neighbours(rank, round)
        assert rank not in neighbours
        assert list(neighbours) == sorted(set(neighbours))
        assert all(rank in mixing.neighbours(peer, round) for peer in neighbours)


@given(mixings(), st.integers(0, 2**40))
def test_rows_entries_the_matrix_and_apply_agree(mixing, round):
    W = mixing.matrix(round)
    from_rows = np.zeros_like(W)
    for rank in range(mixing.size):
        row = mixing.row(rank, round)
        assert list(row) == sorted(row)
        assert all(weight > 0 for weight in row.values())
        from_rows[rank, list(row)] = list(row.values())
    np.testing.assert_allclose(from_rows, W, atol=1e-15)
    ranks, peers, weights = mixing.entries(round)
    assert list(zip(ranks, peers, strict=True)) == sorted(
        {(i, j) for i in range(mixing.size) for j in mixing.row(i, round)}
    )
    np.testing.assert_array_equal(W[ranks, peers], weights)
    X = np.random.default_rng(0).standard_normal((mixing.size, 3))
    np.testing.assert_allclose(mixing.apply(X, round), W @ X, atol=1e-12)
    np.testing.assert_allclose(mixing.apply(X[:, 0], round), W @ X[:, 0], atol=1e-12)
    np.testing.assert_array_equal(mixing.degrees(round), (W - np.diag(np.diag(W)) > 0).sum(axis=1))


@given(mixings(), st.integers(0, 2**40))
def test_a_partner_is_a_neighbour_and_none_only_without_neighbours(mixing, round):
    for rank in range(mixing.size):
        partner, neighbours = mixing.partner(rank, round), mixing.neighbours(rank, round)
        assert partner in neighbours if neighbours else partner is None


@given(mixings(), st.integers(0, 2**20))
def test_periodic_mixings_repeat_and_are_pure_functions_of_their_arguments(mixing, round):
    again = mixing.matrix(round + mixing.period) if mixing.period else mixing.matrix(round)
    np.testing.assert_array_equal(mixing.matrix(round), again)


def test_metropolis_weights_of_the_named_fixed_graphs(topology, sizes):
    for size in sizes:
        mixing = named(topology, size)
        if mixing.period != 1 or topology == "base-graph":
            continue
        graph = nx.Graph()
        graph.add_nodes_from(range(size))
        graph.add_edges_from((i, j) for i in range(size) for j in mixing.neighbours(i))
        np.testing.assert_allclose(from_graph(graph).matrix(), mixing.matrix(), atol=1e-15)


def test_one_learner_keeps_its_own_weights(topology):
    mixing = named(topology, 1)
    assert [mixing.row(0, round) for round in range(3)] == [{0: 1.0}] * 3
    assert mixing.neighbours(0) == ()


def test_two_learners_average(topology):
    np.testing.assert_allclose(named(topology, 2, seed=4).matrix(), [[0.5, 0.5], [0.5, 0.5]])


def test_a_topology_of_no_learners_is_refused(topology):
    with pytest.raises(TopologyError, match="needs at least 1 learner, got 0"):
        named(topology, 0)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist_is_refused(topology, rank):
    with pytest.raises(TopologyError, match=f"no learner {rank}"):
        named(topology, 4).row(rank)


def test_mixings_print_their_name_and_size():
    assert repr(random_ring(8)) == "random-ring(8)"


class TestFromMatrix:
    def test_a_good_matrix_is_taken_as_it_is(self):
        W = ring(5).matrix()
        np.testing.assert_array_equal(from_matrix(W).matrix(), W)

    def test_zeros_are_no_neighbours(self):
        assert from_matrix(ring(5).matrix()).neighbours(0) == (1, 4)

    @pytest.mark.parametrize(
        ("weights", "complaint"),
        [
            ([[0.5, 0.5]], r"is square, got shape \(1, 2\)"),
            ([0.5, 0.5], r"is square, got shape \(2,\)"),
            ([[1.5, -0.5], [-0.5, 1.5]], "no negative entries, got -0.5"),
            ([[0.5, 0.5], [0.4, 0.6]], "is symmetric"),
            ([[0.5, 0.4], [0.4, 0.6]], "row 0 sums to 0.9 instead of 1"),
            ([[1.0, 0.0], [0.0, 1.0]], "falls into 2 parts"),
            ([[float("nan")]], "finite entries only"),
            ([["a"]], "numbers as entries"),
            (np.zeros((0, 0)), "at least 1 learner"),
        ],
    )
    def test_anything_else_is_refused_with_the_reason(self, weights, complaint):
        with pytest.raises(TopologyError, match=complaint):
            from_matrix(weights)


class TestFromGraph:
    @given(st.integers(2, 30), st.integers(0, 1000))
    def test_any_connected_graph_gets_doubly_stochastic_weights_on_its_edges(self, size, seed):
        graph = nx.compose(nx.path_graph(size), nx.gnp_random_graph(size, 0.2, seed=seed))
        mixing = from_graph(graph)
        assert_doubly_stochastic(mixing.matrix())
        assert all(mixing.neighbours(i) == tuple(sorted(graph.neighbors(i))) for i in graph)

    def test_nodes_may_have_any_names_and_are_numbered_in_order(self):
        mixing = from_graph(nx.Graph([("ada", "grace"), ("grace", "emmy")]))
        assert [mixing.neighbours(rank) for rank in range(3)] == [(1,), (0, 2), (1,)]

    def test_loops_and_parallel_edges_change_nothing(self):
        plain = from_graph(nx.path_graph(3)).matrix()
        np.testing.assert_allclose(from_graph(nx.MultiGraph([(0, 1), (0, 1), (1, 2), (1, 1)])).matrix(), plain)

    @pytest.mark.parametrize(
        ("graph", "complaint"),
        [
            (nx.DiGraph([(0, 1)]), "got a directed graph"),
            (nx.Graph(), "got an empty graph"),
            (nx.Graph([(0, 1), (2, 3)]), "falls into 2 parts"),
        ],
    )
    def test_anything_else_is_refused_with_the_reason(self, graph, complaint):
        with pytest.raises(TopologyError, match=complaint):
            from_graph(graph)


def test_relabelling_keeps_the_spectrum_of_every_round():
    mixing = RelabelledMixing("r", ring(9), seed=3)
    expected = np.linalg.eigvalsh(ring(9).matrix())
    for round in range(5):
        np.testing.assert_allclose(np.linalg.eigvalsh(mixing.matrix(round)), expected, atol=1e-12)
