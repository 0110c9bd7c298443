"""The ranking: what wins when, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundelay.planning import Candidate, Cluster, best_of_each, ranking
from roundelay.planning.ranking import adam_advice

USUAL = Cluster(learners=16, model_bytes=170e6, step_s=0.3)
EVEN = replace(USUAL, step_spread=0.0)


def find(ranked: list[Candidate], label: str, topology: str | None = None) -> Candidate:
    return next(row for row in ranked if (row.label, row.topology) == (label, topology))


def test_one_slow_learner_makes_adpsgd_the_best_and_holds_allreduce_back():
    ranked = ranking(replace(USUAL, slowest_factor=10))
    assert ranked[0].strategy == "adpsgd"
    assert ranked[0].ratio_to_ideal > 0.95
    assert find(ranked, "allreduce").ratio_to_ideal < 0.15
    assert "as slowly as the slowest one" in find(ranked, "allreduce").reason


def test_no_learner_is_called_slow_if_all_are_alike():
    assert not any("slowest" in row.reason for row in ranking(replace(USUAL, step_spread=0.3)))


def test_on_an_even_and_fast_cluster_everything_is_near_ideal_and_the_tightest_wins():
    best = ranking(replace(EVEN, bandwidth_Bps=1e13, latency_s=0))[0]
    assert (best.strategy, best.stationary_variance) == ("allreduce", 0)


def test_slow_links_are_named_as_the_reason():
    row = find(ranking(replace(EVEN, bandwidth_Bps=1e6)), "adpsgd", "random-ring")
    assert row.reason == "the links are too slow: one exchange takes 1.13e+03 usual steps; replicas drift apart"


def test_pairwise_averaging_on_a_poor_graph_is_named_as_such():
    ranked = ranking(replace(USUAL, learners=128))
    fixed, randomised = find(ranked, "adpsgd", "ring"), find(ranked, "adpsgd", "random-ring")
    assert fixed.stationary_variance > 4 > randomised.stationary_variance
    assert "drift apart" in fixed.reason
    assert ranked.index(fixed) > ranked.index(randomised)
    assert all(row.ratio_to_ideal > fixed.ratio_to_ideal / 2.1 for row in ranked[: ranked.index(fixed)])


def test_super_learners_join_the_ranking_and_average_the_noise_of_their_group():
    ranked = ranking(replace(USUAL, group_size=4, group_bandwidth_Bps=1e11))
    row = find(ranked, "dpsgd, groups of 4", "complete")
    assert row.stationary_variance == pytest.approx(3 / 4 / 4)
    assert any(row.label == "adpsgd, groups of 4" for row in ranked)


def test_adams_rate_grows_with_the_root_of_the_gradients_that_are_not_averaged():
    factors = {row.label: row.adam_lr_factor for row in ranking(replace(USUAL, group_size=4))}
    assert factors["allreduce"] == 1
    assert factors["adpsgd"] == factors["local-sgd"] == 4
    assert factors["adpsgd, groups of 4"] == 2


def test_a_plan_warns_about_adam_unless_the_optimizer_sees_the_mean_gradient():
    ranked = ranking(replace(USUAL, slowest_factor=10))
    assert "adpsgd may need up to 4 times the learning rate of DDP" in adam_advice(ranked[0])
    assert adam_advice(find(ranked, "allreduce")) is None
    assert adam_advice(ranking(replace(USUAL, learners=1))[0]) is None


def test_allreduce_between_super_learners_is_no_candidate_because_it_does_not_exist():
    assert not any(row.label == "allreduce, groups of 4" for row in ranking(replace(USUAL, group_size=4)))


def test_a_fast_link_inside_the_group_helps():
    slow, fast = (
        find(ranking(replace(USUAL, group_size=4, group_bandwidth_Bps=Bps)), "delay-by-one, groups of 4").step_s
        for Bps in (1e8, 1e11)
    )
    assert fast < slow


def test_one_learner_waits_for_nothing():
    for row in ranking(Cluster(learners=1, model_bytes=1e9, step_s=0.1)):
        assert row.ratio_to_ideal == pytest.approx(1)
        assert row.stationary_variance == pytest.approx(0)


def test_every_row_has_a_reason_and_no_ratio_beats_the_ideal():
    for row in ranking(replace(USUAL, learners=12, group_size=3, slowest_factor=2)):
        assert row.reason
        assert 0 < row.ratio_to_ideal <= 1 + 1e-9
        assert row.steps_per_s == pytest.approx(12 / row.step_s)


def test_a_ranking_is_the_same_every_time():
    assert ranking(USUAL) == ranking(USUAL)


@pytest.mark.parametrize("learners", [16, 24, 100])
def test_rounding_errors_do_not_decide_between_topologies_of_equal_variance(learners):
    pairs = [row.topology for row in ranking(replace(USUAL, learners=learners)) if row.strategy == "adpsgd"]
    assert pairs.index("random-ring") < pairs.index("complete")  # the order of TOPOLOGIES


def test_best_of_each_has_every_strategy_once_in_the_order_of_the_ranking():
    ranked = ranking(USUAL)
    best = best_of_each(ranked)
    assert [row.strategy for row in best] == list(dict.fromkeys(row.strategy for row in ranked))
    assert all(row == next(other for other in ranked if other.strategy == row.strategy) for row in best)


@pytest.mark.parametrize(
    ("bandwidth_Bps", "best"), [(12.5e9, "delay-by-one"), (1.25e8, "adpsgd"), (6.25e6, "local-sgd")]
)
def test_local_sgd_is_the_choice_for_links_that_are_too_slow_for_pairs(bandwidth_Bps, best):
    """40 MB and steps of 200 ms: at 50 Mbit/s an exchange takes 64 steps."""
    cluster = Cluster(learners=4, model_bytes=40e6, step_s=0.2, bandwidth_Bps=bandwidth_Bps)
    ranked = ranking(cluster)
    assert ranked[0].strategy == best
    (local,) = (row for row in best_of_each(ranked) if row.strategy == "local-sgd")
    assert ("the right choice, because links are too slow" in local.reason) == (best == "local-sgd")
    assert ("not needed, because links are fast enough" in local.reason) == (best != "local-sgd")
    assert ('compress="int8"' in local.reason) == (best == "local-sgd")
