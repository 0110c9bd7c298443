"""Advice: the model's laws, where they can be said in a formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundelay.errors import TopologyError
from roundelay.planning import Advice, Situation, advise
from roundelay.planning.advise import BACKWARD_SHARE, BUCKET_BYTES

USUAL = Situation(learners=16, model_bytes=170e6, step_s=0.3)
EVEN = replace(USUAL, step_spread=0.0)


def find(ranked: list[Advice], strategy: str, topology: str | None = None) -> Advice:
    return next(row for row in ranked if (row.strategy, row.topology) == (strategy, topology))


def test_one_slow_learner_makes_adpsgd_the_best_and_holds_allreduce_back():
    ranked = advise(replace(USUAL, slowest_factor=10))
    assert ranked[0].strategy == "adpsgd"
    assert ranked[0].ratio_to_ideal > 0.95
    assert find(ranked, "allreduce").ratio_to_ideal < 0.15
    assert "slowest learner" in find(ranked, "allreduce").reason


def test_nobody_is_blamed_where_nobody_is_slow():
    assert not any("slowest learner" in row.reason for row in advise(replace(USUAL, step_spread=0.3)))


def test_without_spread_an_allreduce_step_is_compute_and_what_is_left_of_communication():
    slow_link = replace(EVEN, bandwidth_Bps=2e8)
    whole = 2 * 15 * (slow_link.latency_s + 170e6 / 16 / 2e8)
    exposed = whole - BACKWARD_SHARE * 0.3
    assert find(advise(slow_link), "allreduce").step_s == pytest.approx(0.3 + exposed)
    hidden = whole * 2e8 / 1e12 + 2 * 15 * slow_link.latency_s  # a link so fast that only the last bucket shows
    fast = find(advise(replace(EVEN, bandwidth_Bps=1e12, latency_s=0)), "allreduce").step_s
    assert 0.3 < fast < 0.3 + hidden
    assert fast == pytest.approx(0.3 + 2 * 15 * 170e6 / 16 / 1e12 * BUCKET_BYTES / 170e6)


def test_without_spread_a_dpsgd_step_is_the_longer_of_computing_and_sending():
    link_s = EVEN.latency_s + 170e6 / 1.25e9
    assert find(advise(EVEN), "dpsgd", "ring").step_s == pytest.approx(max(0.3, 2 * link_s))
    slow_link = replace(EVEN, bandwidth_Bps=2e8)
    assert find(advise(slow_link), "dpsgd", "ring").step_s == pytest.approx(2 * (5e-5 + 170e6 / 2e8))


def test_without_spread_delay_by_one_hides_the_allreduce_behind_the_step():
    assert find(advise(EVEN), "delay-by-one").step_s == pytest.approx(0.3)


def test_on_an_even_and_fast_cluster_everything_is_near_ideal_and_the_tightest_wins():
    ranked = advise(replace(EVEN, bandwidth_Bps=1e13, latency_s=0))
    assert ranked[0].strategy == "allreduce"
    assert ranked[0].stationary_variance == 0


def test_a_slow_link_bounds_even_adpsgd_by_its_lead():
    row = find(advise(replace(EVEN, bandwidth_Bps=1e6)), "adpsgd", "random-ring")
    assert "link is too slow" in row.reason
    assert row.step_s == pytest.approx(2 * (5e-5 + 170) / 16)


def test_pairwise_averaging_on_a_poor_graph_is_named_as_such():
    ranked = advise(replace(USUAL, learners=128))
    ring, randomised = find(ranked, "adpsgd", "ring"), find(ranked, "adpsgd", "random-ring")
    assert ring.stationary_variance > 4 > randomised.stationary_variance
    assert "drift apart" in ring.reason


def test_super_learners_join_the_ranking_and_average_the_noise_of_their_group():
    ranked = advise(replace(USUAL, group_size=4, group_bandwidth_Bps=1e11))
    row = find(ranked, "super-learner x4, dpsgd", "complete")
    assert row.stationary_variance == pytest.approx(3 / 4 / 4)
    assert any(row.strategy == "super-learner x4, adpsgd" for row in ranked)


def test_a_fast_link_inside_the_group_helps():
    slow, fast = (
        find(advise(replace(USUAL, group_size=4, group_bandwidth_Bps=Bps)), "super-learner x4, allreduce").step_s
        for Bps in (1e8, 1e11)
    )
    assert fast < slow


def test_one_learner_has_nobody_to_wait_for():
    for row in advise(Situation(learners=1, model_bytes=1e9, step_s=0.1)):
        assert row.ratio_to_ideal == pytest.approx(1)
        assert row.stationary_variance in (0, pytest.approx(0))


def test_every_row_has_a_reason_and_no_ratio_beats_the_ideal():
    for row in advise(replace(USUAL, learners=12, group_size=3, slowest_factor=2)):
        assert row.reason
        assert 0 < row.ratio_to_ideal <= 1 + 1e-9
        assert row.steps_per_s == pytest.approx(12 / row.step_s)


def test_advice_is_the_same_every_time():
    assert advise(USUAL) == advise(USUAL)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"learners": 0}, "learners must be more than 0, got 0"),
        ({"model_bytes": 0}, "model_bytes must be more than 0"),
        ({"step_s": -1}, "step_s must be more than 0, got -1"),
        ({"bandwidth_Bps": float("nan")}, "bandwidth_Bps must be more than 0, got nan"),
        ({"group_bandwidth_Bps": 0}, "group_bandwidth_Bps must be more than 0"),
        ({"step_spread": -0.1}, "at least 0, got -0.1"),
        ({"slowest_factor": 0.5}, "slowest_factor is at least 1"),
        ({"group_size": 5}, "group_size must divide 16 learners, got 5"),
        ({"learners": 1025}, "at most 1024 learners, got 1025"),
    ],
)
def test_an_impossible_situation_is_refused_with_the_reason(change, complaint):
    with pytest.raises(TopologyError, match=complaint):
        replace(USUAL, **change)
