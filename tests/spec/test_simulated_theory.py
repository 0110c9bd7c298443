"""What the topology package predicts, measured on runs of the strategies; the measurements are those of the benchmark."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from roundelay.simulation.stacked import StackedAllreduce, StackedDelayByOne, StackedDPSGD
from roundelay.topology import base_graph, complete, random_ring, ring, spectrum, stability_bound, torus

MEASURED = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "theory_beside_experiment.py"))
adpsgd_variance, dpsgd_variance, is_stable, measured_bound = (
    MEASURED[name] for name in ("adpsgd_variance", "dpsgd_variance", "is_stable", "measured_bound")
)
exchanged_at_once, exchanged_at_random = MEASURED["exchanged_at_once"], MEASURED["exchanged_at_random"]


@pytest.mark.parametrize("mixing", [ring(8), random_ring(16, seed=1), torus(16), base_graph(6, 1)], ids=repr)
def test_stationary_spread_of_dpsgd_is_that_of_the_spectrum(mixing):
    # 400 rounds of 200 dimensions, correlated over at most 1 / (1 - lambda^2) = 14 rounds: an error below 1.5 % (1 s.d.).
    measured = dpsgd_variance(mixing, dimensions=400, rounds=400, seed=0)
    assert measured == pytest.approx(spectrum(mixing).stationary_variance, rel=0.05)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mixing", [ring(8), ring(5), complete(4)], ids=repr)
def test_dpsgd_is_stable_up_to_its_bound_and_no_further(mixing, momentum):
    bound = stability_bound(mixing, momentum)
    assert is_stable(StackedDPSGD(mixing), mixing.size, 0.97 * bound, momentum)
    assert not is_stable(StackedDPSGD(mixing), mixing.size, 1.03 * bound, momentum)


def test_delay_by_one_is_stable_up_to_the_bound_of_the_complete_graph():
    assert measured_bound(StackedDelayByOne, 4, 0.0) == pytest.approx(stability_bound(complete(4)), abs=0.03)


def test_allreduce_is_stable_up_to_a_step_of_two_curvatures():
    assert measured_bound(StackedAllreduce, 1, 0.0) == pytest.approx(2.0, abs=0.03)


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
    assert slow > exchanged_at_random(8, seldom)  # the weights that arrive are old
    assert slow < 2 * exchanged_at_random(8, seldom)
