"""The Base-(k+1) graph: exact for any number of learners, few neighbours, few rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from roundelay.errors import TopologyError
from roundelay.topology import base_graph, spectrum


def product_over_a_period(size: int, k: int) -> np.ndarray:
    mixing = base_graph(size, k)
    product = np.eye(size)
    for round in range(mixing.period):
        product = mixing.apply(product, round)
    return product


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_product_over_a_period_is_the_mean_for_every_size_up_to_64(k):
    for size in range(1, 65):
        np.testing.assert_allclose(product_over_a_period(size, k), np.full((size, size), 1 / size), atol=1e-12)


@pytest.mark.parametrize(("size", "k"), [(97, 1), (210, 2), (127, 4), (255, 3), (500, 7)])
def test_it_is_the_mean_for_larger_sizes_too(size, k):
    np.testing.assert_allclose(product_over_a_period(size, k), np.full((size, size), 1 / size), atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_no_learner_has_more_than_k_neighbours_and_periods_are_short(k):
    for size in [*range(2, 65), 97, 127, 128, 500, 1000]:
        mixing = base_graph(size, k)
        assert max(mixing.degrees(round).max() for round in range(mixing.period)) <= k
        assert mixing.period <= 2 * math.log(size, k + 1) + 2


def test_a_period_is_not_longer_than_it_must_be():
    for size in range(2, 65):
        assert spectrum(base_graph(size)).exact_after == base_graph(size).period


@pytest.mark.parametrize(("size", "k", "rounds"), [(64, 1, 6), (27, 2, 3), (25, 4, 2), (12, 3, 2)])
def test_sizes_that_factorise_take_one_round_a_factor(size, k, rounds):
    assert base_graph(size, k).period == rounds


def test_a_degree_of_zero_is_refused():
    with pytest.raises(TopologyError, match="degree k of at least 1, got 0"):
        base_graph(5, 0)
