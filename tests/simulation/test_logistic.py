"""Logistic regression around its minimum: the spread that curvature and noise of real data predict."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roundelay.simulation import logistic
from roundelay.simulation.theory import exchanged_at_once
from roundelay.topology import random_ring, ring, spectrum

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_minimum_is_one_and_its_curvatures_are_the_hessians():
    at = logistic.minimum()
    module = torch.nn.Linear(65, 10, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(at.weights)
    (gradient,) = torch.autograd.grad(
        logistic.loss(module, logistic.examples()), module.parameters(), create_graph=True
    )
    assert float(gradient.detach().norm()) < 1e-10
    direction = torch.randn(10, 65, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (curved,) = torch.autograd.grad((gradient * direction).sum(), module.parameters())
    assert at.curvatures.min() <= float((curved * direction).sum() / direction.square().sum()) <= at.curvatures.max()
    trace = 10 * 65 * logistic.DECAY  # and of the loss: mean of |x|^2 (1 - |p|^2)
    x, _ = logistic.examples()
    p = torch.softmax(x @ at.weights.T, dim=1)
    trace += float((x.square().sum(1) * (1 - p.square().sum(1))).mean())
    assert at.curvatures.sum() == pytest.approx(trace, rel=1e-9)


@pytest.mark.parametrize("mixing", [ring(6), random_ring(6)], ids=repr)
def test_without_curvature_the_prediction_is_the_spectrums(monkeypatch, mixing):
    monkeypatch.setattr(logistic, "LR", 1e-9)
    assert logistic.predicted(mixing) == pytest.approx(spectrum(mixing).stationary_variance, rel=1e-6)


def test_curvature_of_the_fixed_ring_is_that_of_the_ar1_process_of_every_mode(monkeypatch):
    n, a = 5, 0.3
    at = logistic.Minimum(torch.zeros(1), np.array([a / logistic.LR]), np.array([2.0]))
    monkeypatch.setattr(logistic, "minimum", lambda: at)
    P = np.eye(n) - np.ones((n, n)) / n
    A, X = P @ ring(n).matrix() - a * P, np.zeros((n, n))
    for _ in range(200):  # the covariance of X <- A X + noise, by iteration
        X = A @ X @ A.T + P
    assert logistic.predicted(ring(n)) == pytest.approx(np.trace(X) / n)


@pytest.mark.parametrize("mixing", [ring(8), random_ring(8)], ids=repr)
def test_dpsgd_spreads_as_predicted(mixing):
    # 250 rounds with a memory of some 10, in some 100 directions that matter: an error of 2 % (1 s.d.).
    assert logistic.dpsgd_spread(mixing, 500, seed=0) == pytest.approx(logistic.predicted(mixing), rel=0.08)


def test_adpsgd_spreads_as_after_an_exchange_at_every_step():
    assert logistic.adpsgd_spread(random_ring(8), 80, seed=0) == pytest.approx(exchanged_at_once(8), rel=0.12)
