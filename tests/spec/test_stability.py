"""Averaging while computing is stable exactly below (1 + lambda_min)(1 + momentum): a check of the recursion."""

from __future__ import annotations

import numpy as np
import pytest

from roundelay.topology import Mixing, complete, exponential, ring, stability_bound, star, torus


def size_after(mixing: Mixing, step: float, momentum: float, rounds: int = 1500) -> float:
    """Largest entry of X after X_{k+1} = W X_k - V_{k+1}, V_{k+1} = beta V_k + step X_k, with curvature 1."""
    W = mixing.matrix()
    X, V = np.random.default_rng(0).standard_normal((2, mixing.size))
    for _ in range(rounds):
        V = momentum * V + step * X
        X = W @ X - V
        size = float(np.abs(X).max())
        if size > 1e6:
            break
    return size


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("mixing", [ring(8), ring(5), torus(16), star(6), complete(4), exponential(16)], ids=repr)
def test_steps_just_below_the_bound_die_out_and_just_above_it_explode(mixing, momentum):
    bound = stability_bound(mixing, momentum)
    assert size_after(mixing, 0.98 * bound, momentum) < 1e-3
    assert size_after(mixing, 1.02 * bound, momentum) > 1e3


def test_the_even_ring_allows_two_thirds_and_the_mean_of_all_allows_one():
    assert stability_bound(ring(16)) == pytest.approx(2 / 3)
    assert stability_bound(complete(16)) == pytest.approx(1)
