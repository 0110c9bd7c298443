"""ADPSGD with rounds counted by steps, as the shards of a node need it: the same partner in the same step."""

from __future__ import annotations

import pytest
from worlds import world

from roundelay.simulation import run
from roundelay.strategies import ADPSGD

LEARNERS, STEPS, MAX_LEAD = 5, 60, 4


def calls_of(latency_s: float, *, by_step: bool):
    """Who called which peer after which step, and the lead of every learner before each step."""
    strategies = [ADPSGD(max_lead=MAX_LEAD) for _ in range(LEARNERS)]
    calls, leads = {}, {}
    clock, _, learners = world(strategies, compute_s=lambda rank, step: 1.0 + 0.1 * rank, latency_s=latency_s)
    for learner in learners:
        learner.strategy.rounds_by_step = by_step
        rank = learner.transport.rank

        def call(peer, *rest, rank=rank, real=learner.transport.call, strategy=learner.strategy):
            calls.setdefault((rank, strategy._steps), peer)  # the first of a step: a learner that waits may call again
            return real(peer, *rest)

        def gradient(step, rank=rank, real=learner.gradient, strategy=learner.strategy):
            leads[rank, step] = strategy._counts.lead
            real(step)

        learner.transport.call, learner.gradient = call, gradient
    run(clock, learners, STEPS)
    return calls, leads


def both(slow, fast):
    """What is in both, as long as no learner has finished and left."""
    return {(rank, step) for rank, step in slow.keys() & fast.keys() if step < STEPS / 2}


def test_shards_that_call_in_the_same_step_call_the_same_peer():
    (slow, _), (fast, _) = calls_of(1.3, by_step=True), calls_of(0.01, by_step=True)
    common = both(slow, fast)
    assert len(common) > LEARNERS * STEPS / 8
    assert len(slow) < 0.8 * len(fast)  # the slow network skips steps, and yet
    assert all(slow[key] == fast[key] for key in common)


def test_rounds_counted_by_exchanges_do_not_have_that_property():
    (slow, _), (fast, _) = calls_of(1.3, by_step=False), calls_of(0.01, by_step=False)
    assert any(slow[key] != fast[key] for key in both(slow, fast))


def test_exchanges_of_two_shards_are_at_most_max_lead_steps_apart():
    (_, slow), (_, fast) = calls_of(2.5, by_step=True), calls_of(0.01, by_step=True)
    apart = [abs(slow[key] - fast[key]) for key in both(slow, fast)]
    assert 0 < max(apart) <= MAX_LEAD


@pytest.mark.parametrize("by_step", [True, False])
def test_a_restart_continues_with_the_next_round(by_step):
    strategy = ADPSGD()
    strategy.rounds_by_step = by_step
    clock, _, learners = world([strategy, ADPSGD()])
    run(clock, learners, 7)
    saved = strategy.state_dict()
    assert saved == {"round": 7}  # with one exchange per step, both ways of counting agree
    strategy.load_state_dict({"round": 30})
    assert strategy.state_dict() == {"round": 30}
