"""Theorems about the mean: mixing keeps the mean of all learners, independent random pulls do not."""

from __future__ import annotations

import numpy as np
import pytest

from roundelay.topology import TOPOLOGIES, named


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_thousand_rounds_keep_the_mean_and_bring_every_learner_to_it(name):
    mixing = named(name, 16, seed=3)
    X = np.random.default_rng(1).standard_normal((16, 2))
    mean = X.mean(axis=0)
    for round in range(1000):
        X = mixing.apply(X, round)
    np.testing.assert_allclose(X.mean(axis=0), mean, atol=1e-12)
    np.testing.assert_allclose(X, np.broadcast_to(mean, X.shape), atol=1e-9)


def test_independent_random_pulls_let_the_mean_drift():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(16)
    drifted = x.copy()
    for _ in range(50):
        drifted = (drifted + drifted[rng.integers(0, 16, 16)]) / 2
    assert abs(drifted.mean() - x.mean()) > 0.05
