"""Without weights the strategies decide as they do with them."""

from __future__ import annotations

import time

import pytest
from torch import nn

from roundelay.clock import VirtualClock
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError
from roundelay.simulation.compute import constant, lognormal, slowed
from roundelay.simulation.network import Links, ModelledNetwork
from roundelay.simulation.timing import Remembered, timing
from roundelay.strategies import ADPSGD, DPSGD
from roundelay.topology import random_matching, random_ring, ring
from roundelay.weights.replica import Replica

LINKS = Links(latency_s=0.03, bandwidth_Bps=1e3, node_size=2, inside_bandwidth_Bps=1e4)
COUNTED = ("exchanges_started", "exchanges_served", "staleness_mean", "staleness_max", "lead_max")


def with_weights(size: int, steps: int, compute) -> tuple[list[float], list[dict[str, float]]]:
    """The same with a real replica on the memory transport; finished learners stay and answer."""
    clock = VirtualClock()
    network = ModelledNetwork(clock, size, LINKS, model_bytes=100.0)
    ended, strategies = {}, [ADPSGD(random_ring(size, seed=1)) for _ in range(size)]

    def learner(rank):
        strategy = strategies[rank]
        strategy.attach(Replica(nn.Linear(1, 1)), network.transports[rank], Membership.of(size))
        for step in range(steps):
            yield compute(rank, step, clock.now())
            yield from strategy.before_step()
            yield from strategy.after_step()
        ended[rank] = clock.now()

    for rank in range(size):
        clock.spawn(learner(rank), f"learner {rank}")
    clock.run()
    return [ended[rank] for rank in range(size)], [strategy.metrics() for strategy in strategies]


def test_it_ends_when_the_run_with_weights_ends():
    compute = slowed(lognormal(1.0, 0.2, seed=2), {0: 3.0})
    ended, metrics = with_weights(6, 12, compute)
    hollow = timing(
        lambda rank: ADPSGD(random_ring(6, seed=1)), 6, steps=12, compute=compute, links=LINKS, model_bytes=100.0
    )
    assert hollow.ended_s == pytest.approx(ended)
    for figure in COUNTED:
        assert [of[figure] for of in hollow.metrics] == [of[figure] for of in metrics]


def test_a_slow_link_makes_exchanges_rare_and_max_lead_makes_learners_wait():
    slow = Links(latency_s=10.0)  # an exchange takes 20 steps

    def run(max_lead):
        mixing = Remembered(random_ring(10))
        return timing(
            lambda _: ADPSGD(mixing, max_lead), 10, steps=100, compute=constant(1.0), links=slow, model_bytes=1.0
        )

    free, bound = run(1000), run(5)
    assert free.ended_s == [100.0] * 10
    assert free.mean("exchanges_per_step") == pytest.approx(0.05, abs=0.02)
    assert min(bound.ended_s) > 150.0
    assert max(metrics["lead_max"] for metrics in bound.metrics) == 5


@pytest.mark.parametrize("mixing", [ring(6), random_ring(6, seed=2), random_matching(6, seed=2)], ids=repr)
def test_remembered_partners_are_the_partners(mixing):
    remembered = Remembered(mixing)
    for round in range(5):
        for rank in range(6):
            assert remembered.partner(rank, round) == mixing.partner(rank, round)
            assert remembered.row(rank, round) == mixing.row(rank, round)


def test_strategies_that_wait_are_refused():
    with pytest.raises(StrategyError, match="ModelledNetwork"):
        timing(lambda _: DPSGD(ring(4)), 4, steps=1, compute=constant(1.0), links=Links(), model_bytes=1.0)


def test_runs_are_equal_bit_for_bit():
    def run():
        return timing(
            lambda _: ADPSGD(random_ring(9)), 9, steps=20, compute=lognormal(1.0, 0.3), links=LINKS, model_bytes=50.0
        )

    assert run() == run()


@pytest.mark.slow
def test_ten_thousand_learners_take_less_than_a_minute():
    mixing = Remembered(random_ring(10_000))
    begun = time.process_time()
    done = timing(
        lambda _: ADPSGD(mixing),
        10_000,
        steps=100,
        compute=lognormal(0.3, 0.1),
        links=Links(5e-6, 12.5e9),
        model_bytes=165e6,
    )
    assert time.process_time() - begun < 100.0  # 60 s on a machine of one's own; tests share theirs
    assert done.mean("exchanges_per_step") > 0.5
