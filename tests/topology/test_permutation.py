"""Keyed permutations: bijections, the same on every machine, uniform if they are few enough to count."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from roundelay.topology.permutation import FEW, TABLE_LIMIT, Permutation, key, mix64, permutation

words = st.integers(0, 2**64 - 1)
feistel_sizes = st.integers(TABLE_LIMIT + 1, 3 * TABLE_LIMIT)


@given(st.integers(1, 300), words)
def test_a_small_permutation_is_a_bijection_with_its_inverse(size, seed):
    p = Permutation(size, seed)
    images = [p(position) for position in range(size)]
    assert sorted(images) == list(range(size))
    assert [p.inverse(image) for image in images] == list(range(size))
    assert p.all().tolist() == images


@given(feistel_sizes, words)
def test_a_large_permutation_is_a_bijection(size, seed):
    assert np.array_equal(np.sort(Permutation(size, seed).all()), np.arange(size))


@given(st.integers(TABLE_LIMIT + 1, 10**12), words, st.data())
def test_feistel_and_its_inverse_undo_each_other(size, seed, data):
    p = Permutation(size, seed)
    position = data.draw(st.integers(0, size - 1))
    assert 0 <= p(position) < size
    assert p.inverse(p(position)) == position
    assert p(p.inverse(position)) == position


@given(feistel_sizes, words, st.data())
def test_one_image_agrees_with_all_images(size, seed, data):
    p = Permutation(size, seed)
    position = data.draw(st.integers(0, size - 1))
    assert p(position) == p.all()[position]


@given(st.lists(words, min_size=1))
def test_hashing_a_number_agrees_with_hashing_an_array(numbers):
    assert mix64(np.array(numbers, dtype=np.uint64)).tolist() == [mix64(number) for number in numbers]


def test_hashing_is_splitmix64():
    # The first outputs of Vigna's splitmix64.c for the state 0, whose increment is the golden ratio's.
    golden = 0x9E3779B97F4A7C15
    assert [mix64((k * golden) % 2**64) for k in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(st.integers(1, FEW), st.integers(0, 2**64 - 1))
def test_few_learners_are_sorted_one_by_one_as_many_are_together(size, seed):
    hashes = mix64(np.arange(size, dtype=np.uint64) * 0x9E3779B97F4A7C15 + np.uint64(key(seed)))
    assert Permutation(size, seed).all().tolist() == np.argsort(hashes, kind="stable").tolist()


def test_permutations_are_the_same_on_every_machine_and_for_ever():
    assert permutation(8, seed=0, round=0).all().tolist() == [1, 7, 6, 5, 4, 3, 2, 0]
    assert [permutation(1_000_000, seed=3, round=12)(i) for i in range(3)] == [474698, 182462, 218366]


def test_small_permutations_are_uniform_over_all_orders():
    counts = Counter(tuple(permutation(4, seed=11, round=round).all().tolist()) for round in range(6000))
    assert set(counts) == set(itertools.permutations(range(4)))
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


@pytest.mark.parametrize("size", [64, TABLE_LIMIT + 64])
def test_the_image_of_one_learner_is_uniform(size):
    images = [permutation(size, seed=5, round=round)(17) for round in range(4000)]
    counts = np.histogram(images, bins=16, range=(0, size))[0]
    assert stats.chisquare(counts).pvalue > 1e-3


def test_neighbouring_places_of_a_large_permutation_are_independent():
    images = Permutation(100_003, key(2, 3)).all()
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.015  # five standard errors


def test_seed_and_round_are_no_interchangeable_parts_of_the_key():
    assert (permutation(100, 1, 2).all() != permutation(100, 2, 1).all()).any()
    assert (permutation(100, 0, 0).all() != permutation(100, 0, 1).all()).any()
