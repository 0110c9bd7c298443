"""Scaling from one learner to all, and the papers' hours beside the model's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundelay.planning import Cluster, best_of_each, ranking, scaling
from roundelay.planning.published import PUBLISHED, comparisons, fitted_sample_s, training_h
from roundelay.planning.scaling import ScalingPoint, sizes

FAST = Cluster(16, 165e6, 0.3, bandwidth_Bps=12.5e9, latency_s=5e-6, group_size=4, group_bandwidth_Bps=50e9)


def points(cluster: Cluster, epoch_steps: int | None = None) -> list[ScalingPoint]:
    return scaling(cluster, best_of_each(ranking(cluster)), epoch_steps)


def test_one_learner_needs_its_steps_and_nothing_else():
    for point in points(FAST, epoch_steps=1000):
        if point.learners == 1:
            assert point.epoch_s == pytest.approx(1000 * 0.3)
            assert (point.speedup, point.efficiency) == pytest.approx((1.0, 1.0))


def test_without_spread_and_with_a_perfect_network_everything_scales_perfectly():
    perfect = replace(FAST, step_spread=0.0, latency_s=0.0, bandwidth_Bps=1e20, group_bandwidth_Bps=1e20)
    assert all(point.efficiency == pytest.approx(1.0) for point in points(perfect))


def test_an_epoch_takes_the_time_of_one_learner_divided_by_the_speed_up():
    for point in points(replace(FAST, slowest_factor=3.0), epoch_steps=500):
        assert point.epoch_s == pytest.approx(500 * 0.3 / point.speedup)
        assert point.speedup <= point.learners * (1 + 1e-9)


def test_every_candidate_is_predicted_from_one_learner_to_all():
    for label in {point.strategy for point in points(FAST)}:
        assert [point.learners for point in points(FAST) if point.strategy == label] == [1, 2, 4, 8, 16]


def test_the_last_point_is_that_of_the_ranking():
    last = {point.strategy: point.step_s for point in points(FAST) if point.learners == 16}
    assert last == {row.label: row.step_s for row in best_of_each(ranking(FAST))}


def test_a_size_that_a_topology_does_not_support_is_left_out():
    cube = [row for row in ranking(replace(FAST, learners=8, group_size=1)) if row.topology == "hypercube"][:1]
    found = scaling(replace(FAST, learners=12, group_size=1), cube)
    assert [point.learners for point in found] == [1, 2, 4, 8]


def test_sizes_are_whole_groups_once_there_is_more_than_one():
    assert sizes(replace(FAST, learners=20)) == [1, 2, 4, 8, 16, 20]
    assert sizes(replace(FAST, learners=12, group_size=6)) == [1, 2, 4, 6, 12]


def test_the_fitted_rows_fit_and_the_others_are_predictions():
    assert training_h(fitted_sample_s(PUBLISHED[0]), 16, 2560) == pytest.approx(14.0, rel=1e-4)
    rows = comparisons()
    assert [row.fitted for row in rows] == [True, False, True, False]
    assert [row.published_h for row in rows] == [14.0, 5.2, 2.28, 1.98]
    assert [row.predicted_h for row in rows] == pytest.approx([14.0, 3.54, 2.28, 1.17], abs=0.01)
    assert rows[1].sample_s == rows[0].sample_s
