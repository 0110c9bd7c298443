"""What the topology package predicts, seen in runs of the strategies themselves."""

from __future__ import annotations

import pytest

from roundelay.simulation.theory import (
    adpsgd_variance,
    delay_bound,
    dpsgd_variance,
    exchanged_at_once,
    exchanged_at_random,
    is_stable,
    measured_bound,
)
from roundelay.strategies import DPSGD, Allreduce, DelayByOne, SuperLearner
from roundelay.topology import base_graph, complete, random_ring, ring, spectrum, stability_bound, torus


@pytest.mark.parametrize("mixing", [ring(8), random_ring(16, seed=1), torus(16), base_graph(6, 1)], ids=repr)
def test_stationary_spread_of_dpsgd_is_what_the_spectrum_says(mixing):
    # 400 rounds of 200 dimensions, correlated over at most 1 / (1 - lambda^2) = 14 rounds: an error below 1.5 % (1 s.d.).
    measured = dpsgd_variance(mixing, dimensions=400, rounds=400, seed=0)
    assert measured == pytest.approx(spectrum(mixing).stationary_variance, rel=0.05)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mixing", [ring(8), ring(5), complete(4)], ids=repr)
def test_dpsgd_is_stable_up_to_its_bound_and_no_further(mixing, momentum):
    bound = stability_bound(mixing, momentum)
    assert is_stable(DPSGD(mixing), mixing.size, 0.97 * bound, momentum)
    assert not is_stable(DPSGD(mixing), mixing.size, 1.03 * bound, momentum)


@pytest.mark.parametrize(
    ("strategy_of", "bound"),
    [
        (Allreduce, delay_bound(0)),
        (lambda: DelayByOne(delayed="gradients"), delay_bound(1)),
        (DelayByOne, stability_bound(complete(4))),
        (lambda: SuperLearner(DPSGD(ring(2)), group_size=2), stability_bound(ring(2))),
    ],
    ids=["allreduce", "delayed gradients", "delayed weights", "super-learners"],
)
def test_staleness_costs_what_a_delayed_gradient_costs(strategy_of, bound):
    assert is_stable(strategy_of(), 4, 0.97 * bound, momentum=0.0)
    assert not is_stable(strategy_of(), 4, 1.03 * bound, momentum=0.0)


def test_bisection_finds_the_bound():
    assert measured_bound(Allreduce, 2, 0.0, highest=2.2) == pytest.approx(2.0, abs=0.03)


def test_stationary_spread_of_adpsgd_over_fast_links_is_that_of_an_exchange_after_every_step():
    # 66 looks, one step apart, of 8 x 100 numbers with a memory of about a step: an error of about 1 % (1 s.d.).
    measured, exchanges = adpsgd_variance(random_ring(8, seed=0), dimensions=100, steps=100, seed=0, exchange_s=1e-3)
    assert exchanges == pytest.approx(1.0, abs=0.02)
    assert measured == pytest.approx(exchanged_at_once(8), rel=0.06)


def test_a_slow_link_lets_replicas_drift_and_max_lead_bounds_the_drift():
    fast, _ = adpsgd_variance(random_ring(8, seed=0), dimensions=100, steps=100, seed=0, exchange_s=0.1)
    slow, seldom = adpsgd_variance(random_ring(8, seed=0), dimensions=100, steps=100, seed=0, exchange_s=8.0)
    bounded, often = adpsgd_variance(
        random_ring(8, seed=0), dimensions=100, steps=100, seed=0, exchange_s=8.0, max_lead=2
    )
    assert seldom < often < 1.0
    assert fast < bounded < slow
    assert slow > exchanged_at_random(8, seldom)  # what arrives is old
    assert slow < 2 * exchanged_at_random(8, seldom)
