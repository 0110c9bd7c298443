import numpy as np
import pytest
import torch
from worlds import LR, MOMENTUM, problem, train, weights, world

from roundelay.clock import VirtualClock
from roundelay.cluster.membership import Membership
from roundelay.errors import PeerLostError, StrategyError
from roundelay.simulation import run
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, SuperLearner
from roundelay.topology import random_ring, ring
from roundelay.transport import SimulatedNetwork
from roundelay.transport.solo import SoloTransport
from roundelay.weights.replica import Replica

HALVES = np.full((2, 2), 0.5)


def group_recursion(W, steps, groups, group_size):
    """D-PSGD of groups: each has one x, and the mean gradient of its members."""
    H, targets = problem(groups * group_size)
    X, V = np.zeros((groups, 12)), np.zeros((groups, 12))
    for k in range(steps):
        G = (H * (np.repeat(X, group_size, 0) - targets)).reshape(groups, group_size, 12).mean(1)
        V = MOMENTUM * V + G
        X = W(k) @ X - LR * V
    return np.repeat(X, group_size, 0)


@pytest.mark.parametrize(("between", "W"), [(lambda: DPSGD(ring(2)), ring(2).matrix), (DelayByOne, lambda k: HALVES)])
def test_two_groups_of_two_equal_the_recursion_on_two(between, W):
    clock, _, learners = world([SuperLearner(between(), 2) for _ in range(4)], compute_s=lambda rank, _: 1.0 + rank)
    run(clock, learners, 40)
    X = weights(learners)
    np.testing.assert_allclose(X, group_recursion(W, 40, 2, 2), rtol=0, atol=1e-12)
    assert np.array_equal(X[0], X[1])
    assert np.array_equal(X[2], X[3])


@pytest.mark.parametrize("group_size", [1, 3])
def test_groups_of_other_sizes(group_size):
    size = 3 * group_size
    clock, _, learners = world([SuperLearner(DPSGD(random_ring(3)), group_size) for _ in range(size)])
    run(clock, learners, 30)
    expected = group_recursion(random_ring(3).matrix, 30, 3, group_size)
    np.testing.assert_allclose(weights(learners), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("latency_s", [0.0, 0.05, 0.9])
def test_members_stay_bit_identical_while_groups_exchange_asynchronously(latency_s):
    clock, _, learners = world(
        [SuperLearner(ADPSGD(ring), 2) for _ in range(6)],
        compute_s=lambda rank, step: 1.0 + 0.37 * (rank // 2) + 0.01 * (step % 3),
        latency_s=latency_s,
    )
    ends = [clock.spawn(learner.process(40), f"learner {rank}") for rank, learner in enumerate(learners)]
    clock.run(until=15.0)
    clock.run()
    assert all(end.done() for end in ends)
    X = weights(learners)
    assert np.array_equal(X[0::2], X[1::2])
    assert learners[0].strategy.metrics()["exchanges_finished"] > 20
    assert learners[1].strategy.metrics() == {}


@pytest.mark.parametrize("between", [ADPSGD, DPSGD, DelayByOne])
def test_every_member_has_a_state_to_save_and_load(between):
    clock, _, learners = world([SuperLearner(between(), 2) for _ in range(4)])
    run(clock, learners, 3)
    for learner in learners:
        learner.strategy.load_state_dict(learner.strategy.state_dict())


def test_groups_that_exchange_asynchronously_conserve_their_sum():
    clock, _, learners = world(
        [SuperLearner(ADPSGD(ring(2)), 2) for _ in range(4)],
        compute_s=lambda rank, step: 1.0 + 0.37 * (rank // 2),
        latency_s=0.3,
        momentum=0.0,
    )
    updates = np.zeros(12)
    for learner in learners:
        inner = learner.gradient

        def gradient(step, inner=inner, module=learner.module):
            inner(step)
            updates[:] -= LR / 2 * torch.cat([p.grad for p in module.parameters()]).numpy()

        learner.gradient = gradient
    run(clock, learners, 40)
    np.testing.assert_allclose(weights(learners)[::2].sum(0), updates, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dead", [2, 3])
def test_a_group_that_loses_its_leader_or_a_member_raises(dead):
    clock, network, learners = world([SuperLearner(ADPSGD(ring(2)), 2) for _ in range(4)])
    with pytest.raises(PeerLostError, match=f"lost learner {dead}"):
        train(clock, network, learners, [50] * 4, kill={dead: 3.3})


def test_other_groups_go_on_without_a_dead_one():
    clock, network, learners = world([SuperLearner(ADPSGD(ring(2)), 2) for _ in range(4)])
    train(clock, network, learners, [30] * 4, kill={2: 3.3, 3: 3.3})
    X = weights(learners)
    assert np.array_equal(X[0], X[1])
    assert learners[0].strategy.between._counts.steps == 30
    assert learners[0].strategy.metrics()["peers_lost"] == 1, "a dead follower is no lost neighbour"


def test_members_with_unequal_numbers_of_batches_are_told():
    clock, network, learners = world([SuperLearner(DPSGD(ring(2)), 2) for _ in range(4)])
    with pytest.raises(StrategyError, match="equally many batches"):
        train(clock, network, learners, [5, 6, 5, 5])


def test_groups_with_unequal_numbers_of_steps_all_end():
    clock, network, learners = world([SuperLearner(DPSGD(ring(2)), 2) for _ in range(4)])
    train(clock, network, learners, [5, 5, 9, 9])
    X = weights(learners)
    assert np.array_equal(X[0::2], X[1::2])


def test_a_group_counts_once_in_the_consensus():
    clock, _, learners = world([SuperLearner(ADPSGD(ring(2)), 2) for _ in range(4)])
    run(clock, learners, 3)
    assert [learner.strategy.consensus_weight for learner in learners] == [1.0, 0.0, 1.0, 0.0]
    assert [learner.strategy.weights() is not None for learner in learners] == [True, False, True, False]


def test_the_state_is_that_between_groups():
    clock, _, learners = world([SuperLearner(DPSGD(ring(2)), 2) for _ in range(4)])
    run(clock, learners, 3)
    state = learners[0].strategy.state_dict()
    assert state == {"between": {"round": 3}}
    learners[0].strategy.load_state_dict({"between": {"round": 8}})
    assert learners[0].strategy.state_dict() == {"between": {"round": 8}}


def test_abandon_before_attach_does_nothing():
    SuperLearner(ADPSGD(ring(2)), 2).abandon()


@pytest.mark.parametrize("between", [Allreduce(), DelayByOne("gradients"), SuperLearner(DPSGD(ring(1)), 2)])
def test_strategies_that_average_gradients_do_not_fit_between(between):
    with pytest.raises(StrategyError, match="averages gradients; use ADPSGD, DPSGD, LocalSGD or DelayByOne"):
        SuperLearner(between, 2)


def test_bad_group_sizes_are_refused():
    with pytest.raises(StrategyError, match="at least 1, got 0"):
        SuperLearner(DPSGD(ring(2)), 0)
    with pytest.raises(StrategyError, match="group_size 2 must divide the 1 learners"):
        SuperLearner(DPSGD(ring(2)), 2).attach(Replica(torch.nn.Linear(1, 1)), SoloTransport(), Membership.of(1))


def test_leaders_of_whole_groups_go_on_without_a_broken_one():
    network = SimulatedNetwork(VirtualClock(), 6)
    strategies = [SuperLearner(ADPSGD(ring), 2) for _ in range(6)]
    for rank, strategy in enumerate(strategies):
        strategy.attach(Replica(torch.nn.Linear(2, 2)), network.transports[rank], Membership.of(6))
    left = Membership.of(6).without(3)
    for strategy in strategies:
        strategy.reform(left)
    assert strategies[0].between.membership.living == (0, 4)
    assert {strategies[0].between._partners.next() for _ in range(4)} == {4}
    assert {strategies[4].between._partners.next() for _ in range(4)} == {0}
    assert strategies[2].between.membership.living == (0, 2, 4), "its group is not whole: it will leave"


def test_synchronous_groups_cannot_re_form_without_a_meeting():
    network = SimulatedNetwork(VirtualClock(), 4)
    strategy = SuperLearner(DPSGD(ring(2)), 2)
    strategy.attach(Replica(torch.nn.Linear(2, 2)), network.transports[0], Membership.of(4))
    with pytest.raises(StrategyError, match="DPSGD learners must meet"):
        strategy.reform(Membership.of(4).without(2).without(3))


def test_the_name_of_a_strategy_is_no_strategy_between_groups():
    with pytest.raises(StrategyError, match=r"needs the strategy between groups, such as ADPSGD\(\), got 'adpsgd'"):
        SuperLearner("adpsgd")
