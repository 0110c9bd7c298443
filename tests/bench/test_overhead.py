"""What metrics and checkpoints cost is read off one run's steps."""

from __future__ import annotations

import numpy as np
import pytest

from roundelay.bench.overhead import Trace, costs, measure
from roundelay.errors import RoundelayError

STEP_S = 0.02


def trace(*, row_s: float = 0.0, saving_s: float = 0.0, periods: int = 20, jitter: float = 0.0, seed: int = 0) -> Trace:
    """Every 50th step makes a row and takes row_s more; while the first 10 of every 100 run, all save: saving_s more each."""
    noise = np.random.default_rng(seed).normal(scale=jitter, size=100 * periods)
    gaps = STEP_S + noise
    gaps[49::50] += row_s
    begins = np.arange(0, 100 * periods, 100)
    for begin in begins:
        gaps[begin : begin + 10] += saving_s
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    savings = [(times[begin], times[begin + 10]) for begin in begins]
    return Trace(times, frozenset(range(50, 100 * periods + 1, 50)), savings)


def test_a_run_without_extra_time_costs_nothing():
    for row in costs([trace()]):
        assert row.overhead == pytest.approx(0.0, abs=1e-9)


def test_known_extra_times_are_found():
    metrics, both = costs([trace(row_s=0.010, saving_s=0.004), trace(row_s=0.010, saving_s=0.004)])
    assert metrics.case == "metrics"
    assert metrics.overhead == pytest.approx(0.010 / 50 / STEP_S, rel=0.15)  # among steps without checkpoints: 2 of 90
    assert both.overhead == pytest.approx((2 * 0.010 + 10 * 0.004) / (100 * STEP_S), rel=1e-6)
    assert both.steps_per_s == pytest.approx(2 * 100 / (100 * STEP_S + 0.060), rel=1e-6)


def test_the_interval_holds_the_truth_on_a_noisy_machine():
    truth = 10 * 0.004 / (100 * STEP_S)
    held = 0
    for seed in range(20):
        _, both = costs([trace(saving_s=0.004, jitter=0.005, seed=seed)])
        held += both.ci95[0] <= truth <= both.ci95[1]
    assert held >= 16


def test_too_short_a_run_is_refused():
    with pytest.raises(RoundelayError, match="longer"):
        costs([trace(periods=1)])


def test_a_real_run_is_measured():
    rows = measure(learners=2, seconds=8.0, checkpoint_every_s=2.0)
    assert [row.case for row in rows] == ["metrics", "metrics and checkpoints"]
    for row in rows:
        assert 10 < row.steps_per_s < 2 / STEP_S
        assert row.ci95[0] <= row.overhead <= row.ci95[1]
