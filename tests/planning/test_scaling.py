"""Predictions against closed forms, and against the strategies themselves on the virtual clock."""

from __future__ import annotations

import pytest

from roundelay.planning.scaling import (
    PUBLISHED as ROWS,
    STRATEGIES,
    Job,
    fitted_sample_s,
    paper_hours,
    papers,
    predict,
    step_s,
)
from roundelay.simulation.learners import seconds_per_step
from roundelay.simulation.network import Links
from roundelay.strategies import DPSGD, DelayByOne
from roundelay.topology import ring

FAST = Links(latency_s=5e-6, bandwidth_Bps=12.5e9, node_size=4, inside_bandwidth_Bps=50e9)


def job(**changes) -> Job:
    return Job(**({"model_bytes": 165e6, "step_s": 0.3, "batch": 128, "epoch_samples": 1e6, "links": FAST} | changes))


def test_one_learner_needs_its_steps_and_nothing_else():
    for row in predict(job(), learners=(1,)):
        assert row.epoch_s == pytest.approx(1e6 / 128 * 0.3)
        assert (row.speedup, row.efficiency) == pytest.approx((1.0, 1.0))


def test_without_spread_and_with_a_perfect_network_everything_scales_perfectly():
    perfect = job(spread=0.0, links=Links(node_size=4))
    for row in predict(perfect, learners=(4, 64)):
        assert row.efficiency == pytest.approx(1.0)


def test_nobody_is_faster_than_the_ideal():
    for row in predict(job(), learners=(1, 16, 256)):
        assert row.efficiency <= 1.0 + 1e-9


# Where the links are the bottleneck, messages queue at ports out of step, which the recursion leaves out.
@pytest.mark.parametrize(("bandwidth_Bps", "error"), [(1e9, 0.01), (100e6, 0.2)])
def test_swaps_and_averages_take_what_the_strategies_take_on_the_clock(bandwidth_Bps, error):
    links = Links(latency_s=1e-3, bandwidth_Bps=bandwidth_Bps)
    one = job(model_bytes=100e6, step_s=0.5, spread=0.0, links=links)
    for name, strategy_of in (("dpsgd ring", lambda: DPSGD(ring(8))), ("delay-by-one", DelayByOne)):
        on_the_clock = seconds_per_step(strategy_of, links, 100e6, [0.5] * 8)
        assert step_s(name, 8, one) == pytest.approx(on_the_clock, rel=error)


def test_learners_of_a_node_share_its_port():
    slow = job(model_bytes=1e9, step_s=0.01, spread=0.0, links=Links(bandwidth_Bps=1e9, node_size=4))
    # A ring over nodes of 4: two models leave each node in a round.
    assert step_s("dpsgd ring", 16, slow) == pytest.approx(2.0)


def test_the_fitted_rows_fit_and_the_others_are_predictions():
    assert paper_hours(fitted_sample_s(ROWS[0]), 16, 2560) == pytest.approx(14.0, rel=1e-4)
    rows = papers()
    assert [row["fitted"] for row in rows] == [True, False, True, False]
    assert [row["published_h"] for row in rows] == [14.0, 5.2, 2.28, 1.98]
    assert rows[1]["sample_s"] == rows[0]["sample_s"]


def test_every_strategy_is_predicted_for_every_number_of_learners():
    assert {(row.strategy, row.learners) for row in predict(job(), learners=(1, 2, 3))} == {
        (strategy, n) for strategy in STRATEGIES for n in (1, 2, 3)
    }
