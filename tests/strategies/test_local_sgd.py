import itertools

import numpy as np
import pytest
import torch
from worlds import LR, MOMENTUM, problem, recursion, train, weights, world as slow_world

from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError, TopologyError
from roundelay.simulation import run
from roundelay.simulation.learners import start
from roundelay.strategies import DPSGD, LocalSGD, SuperLearner
from roundelay.topology import complete, random_matching, random_ring, ring
from roundelay.topology.registry import TOPOLOGIES, named
from roundelay.weights.replica import Replica

ROUNDS = 6


def world(strategies, **options):
    """Without latency, learners come to their outer steps at the same moment, so each takes all its local steps."""
    return slow_world(strategies, **{"latency_s": 0.0} | options)


def outer_recursion(W, rounds, size, every, lr=0.7, momentum=0.9, overlap=False, seed=0):
    """The equations of LocalSGD as they stand in its docstring, on quadratics whose gradients are exact.

    With overlap, a round's mean comes one round later: p <- p + (phi - base), where base is p when the round began.
    """
    H, targets = problem(size, seed=seed)
    p, phi, m, V = (np.zeros_like(targets) for _ in range(4))
    late = None
    for k in range(rounds):
        for _ in range(every):
            V = MOMENTUM * V + H * (p - targets)
            p = p - LR * V
        if late is not None:
            phi, p = late[0], p + late[0] - late[1]
        delta = p - phi
        m = momentum * m + delta
        y = phi + lr * (momentum * m + delta)
        mean = W(k) @ y
        if overlap:
            late = mean, p
        else:
            phi = p = mean
    if late is not None:  # `finish` waits for the last round
        p = p + late[0] - late[1]
    return p


def possible(sizes):
    for name, size in itertools.product(TOPOLOGIES, sizes):
        try:
            named(name, size, degree=2)
        except TopologyError:
            continue
        yield name, size


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("name", "size"), list(possible([1, 2, 3, 4, 6, 8])))
def test_local_sgd_equals_its_recursion_on_every_topology(name, size, overlap):
    mixing = named(name, size, seed=5, degree=2)
    strategies = [LocalSGD(named(name, size, seed=5, degree=2), every=3, overlap=overlap) for _ in range(size)]
    clock, _, learners = world(strategies)
    run(clock, learners, 3 * ROUNDS)
    expected = outer_recursion(mixing.matrix, ROUNDS, size, 3, overlap=overlap)
    np.testing.assert_allclose(weights(learners), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.0), (0.3, 0.5), (1.2, 0.9)])
def test_outer_rate_and_momentum(lr, momentum):
    clock, _, learners = world([LocalSGD("random-matching", 4, lr, momentum) for _ in range(4)])
    run(clock, learners, 20)
    mixing = random_matching(4)
    expected = outer_recursion(mixing.matrix, 5, 4, 4, lr, momentum)
    np.testing.assert_allclose(weights(learners), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 4])
def test_the_mean_over_learners_is_diloco_with_torchs_own_nesterov(size):
    """An independent oracle: the mean of replicas on equal curvatures follows torch.optim.SGD(nesterov) on mean deltas."""
    clock, _, learners = world([LocalSGD(ring, every=5) for _ in range(size)], momentum=0.0)
    for learner in learners:
        learner.module.curvature = learners[0].module.curvature
    run(clock, learners, 20)
    h, target = problem(size)[0][0], problem(size)[1].mean(0)
    phi = torch.nn.Parameter(torch.zeros(12, dtype=torch.float64))
    outer = torch.optim.SGD([phi], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        local = phi.detach().numpy().copy()
        for _ in range(5):
            local -= LR * h * (local - target)
        phi.grad = phi.detach() - torch.tensor(local)
        outer.step()
    np.testing.assert_allclose(weights(learners).mean(0), phi.detach().numpy(), rtol=0, atol=1e-12)


def test_one_local_step_without_outer_momentum_is_the_average_of_weights_after_every_step():
    """W (X - alpha V): DPSGD's sum and step in the other order, so its recursion on X' = W X is the same."""
    clock, _, learners = world([LocalSGD(random_ring(4, seed=2), 1, 1.0, 0.0) for _ in range(4)])
    run(clock, learners, 30)
    H, targets = problem(4)
    X, V = np.zeros_like(targets), np.zeros_like(targets)
    for k in range(30):
        V = MOMENTUM * V + H * (X - targets)
        X = random_ring(4, seed=2).matrix(k) @ (X - LR * V)
    np.testing.assert_allclose(weights(learners), X, rtol=0, atol=1e-12)


def test_one_overlapped_step_without_outer_momentum_is_dpsgd():
    """x_i <- sum_j W_ij x_j + the step taken meanwhile: what DPSGD does."""
    mixing = random_ring(4, seed=3)
    clock, _, learners = world([LocalSGD(random_ring(4, seed=3), 1, 1.0, 0.0, overlap=True) for _ in range(4)])
    run(clock, learners, 20)
    late = recursion(lambda k: np.eye(4) if k == 0 else mixing.matrix(k - 1), 20, 4)
    np.testing.assert_allclose(weights(learners), mixing.matrix(19) @ late, rtol=0, atol=1e-12)
    clock, _, swapping = world([DPSGD(random_ring(4, seed=3)) for _ in range(4)])
    run(clock, swapping, 20)
    np.testing.assert_allclose(weights(swapping), recursion(mixing.matrix, 20, 4), rtol=0, atol=1e-12)


def disagreement(lr, momentum, rounds, seed):
    """The squared distance from the mean after each round of random pairs that start apart and take no local steps."""
    clock, _, learners = world([LocalSGD(random_matching(8, seed=seed), 1, lr, momentum) for _ in range(8)], lr=0.0)
    start, left = np.random.default_rng(seed).standard_normal((8, 12)), []
    for learner, row in zip(learners, torch.tensor(start), strict=True):
        with torch.no_grad():
            learner.module.head.copy_(row[:6])
            learner.module.tail.copy_(row[6:])
        clock.spawn(learner.process(rounds))
    for _ in range(rounds):
        X = weights(learners)
        left.append(((X - X.mean(0)) ** 2).sum())
        clock.run(until=clock.now() + 1.0)
    return np.array(left)


def test_random_pairs_lose_disagreement_at_the_rate_of_the_topology_whatever_the_outer_momentum():
    """E|X - mean|^2 falls by rho = (n-2)/(2(n-1)) per round. With the pull in a heavy-ball momentum it would grow by 1.07."""
    plain = [disagreement(1.0, 0.0, 4, seed) for seed in range(60)]
    np.testing.assert_allclose([disagreement(0.7, 0.9, 4, seed) for seed in range(60)], plain, rtol=1e-9)
    mean = np.mean(plain, axis=0)
    np.testing.assert_allclose(mean[1:] / mean[:-1], 6 / 14, rtol=0.1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_slow_learner_takes_fewer_steps_in_a_round_and_delays_no_other(overlap):
    """Learner 0 is 5 times slower. The others take 60 steps in 60 s; only messages (10 ms) add to that."""
    clock, _, learners = world(
        [LocalSGD(complete, every=10, overlap=overlap) for _ in range(4)],
        latency_s=0.01,
        compute_s=lambda rank, _: 5.0 if rank == 0 else 1.0,
    )
    times = {}

    def noted(learner, steps):
        yield from learner.process(steps)
        times[learner.transport.rank] = clock.now()

    for rank, learner in enumerate(learners):
        clock.spawn(noted(learner, 12 if rank == 0 else 60))
    clock.run()
    assert all(times[rank] < 60.6 for rank in (1, 2, 3)), times
    assert [learner.strategy.metrics()["rounds"] for learner in learners[1:]] == [6, 6, 6]
    assert learners[0].strategy.metrics()["rounds"] >= 5, "it leaves at about the time of the last round"
    assert learners[0].strategy.metrics()["local_steps"] == 2


@pytest.mark.parametrize("topology", [complete, random_matching])
def test_every_learner_takes_its_steps_if_messages_take_longer_than_they_do(topology):
    """With overlap a learner takes 5 steps (5 s) in a round, whose messages take up to 16 s: 125 steps in 400 s."""
    clock, _, learners = world(
        [LocalSGD(topology, every=5, overlap=True) for _ in range(4)],
        latency_s=4.0,
        compute_s=lambda rank, _: 1.0 + 0.01 * rank,
    )
    taken = [0] * 4
    for learner in learners:

        def counted(step, learner=learner, gradient=learner.gradient):
            taken[learner.transport.rank] = step
            gradient(step)

        learner.gradient = counted
    start(clock, learners)
    clock.run(until=400.0)
    assert min(taken) >= 125


def test_a_learner_that_takes_no_steps_at_all_takes_part_in_rounds():
    """Its training thread may be busy: evaluating, waiting for data, or waiting for the others to use up the budget."""
    clock, _, learners = world([LocalSGD(complete, 2, 1.0, 0.0) for _ in range(2)])
    idle, busy = learners

    def idles():
        idle.strategy.attach(Replica(idle.module), idle.transport, Membership.of(2))
        yield 100.0
        yield from idle.strategy.drain()

    clock.spawn(idles())
    clock.spawn(busy.process(8))
    clock.run()
    H, targets = problem(2)
    X = np.zeros_like(targets)
    V = np.zeros(12)
    for _ in range(4):
        for _ in range(2):
            V = MOMENTUM * V + H[1] * (X[1] - targets[1])
            X[1] -= LR * V
        X[:] = X.mean(0)
    np.testing.assert_allclose(weights(learners), X, rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", [complete, random_matching, random_ring])
@pytest.mark.parametrize("at", [4.5, 5.005, 7.3])
def test_a_learner_that_dies_delays_no_other(topology, at):
    clock, network, learners = world([LocalSGD(topology, every=5) for _ in range(4)], latency_s=0.01)
    train(clock, network, learners, [40] * 4, kill={2: at})
    assert clock.now() < 41.0
    assert learners[0].strategy.metrics()["rounds"] == 8


def test_a_frozen_link_costs_one_wait_for_heartbeats():
    clock, network, learners = world([LocalSGD(complete, every=5) for _ in range(3)], latency_s=0.01)
    network.cut(0, 1, at=4.0)
    train(clock, network, learners, [40] * 3)
    assert clock.now() < 43.0, "until the peer is silent, 1.5 s after the cut"
    assert learners[2].strategy.metrics()["neighbours_left_out"] == 0


def test_a_learner_that_joins_is_in_step_after_one_round():
    clock, network, learners = world([LocalSGD(complete, 5, 1.0, 0.0) for _ in range(3)])
    train_until = 40
    for learner in learners:
        clock.spawn(learner.process(train_until))
    clock.run(until=12.0)
    grown = Membership((0, 1, 2, 3), 1)
    newcomer = world([LocalSGD(complete, 5, 1.0, 0.0)])[2][0]
    newcomer.transport, newcomer.membership = network.add(), grown
    clock.spawn(newcomer.process(25))
    for learner in learners:
        learner.strategy.reform(grown)
    clock.run(until=20.5)
    everyone = [*learners, newcomer]
    outer = np.stack([learner.strategy._loop._outer.phi.parts[0].numpy() for learner in everyone])
    np.testing.assert_allclose(outer - outer[0], 0, atol=1e-12)
    clock.run()
    assert clock.now() < 42.0


def _restored(learner, state, steps):
    learner.strategy.attach(Replica(learner.module), learner.transport, Membership.of(learner.transport.size))
    learner.module.load_state_dict(state["module"])
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.strategy.load_state_dict(state["strategy"])
    for step in range(steps):
        learner.gradient(step)
        yield 1.0
        yield from learner.strategy.before_step()
        learner.optimizer.step()
        yield from learner.strategy.after_step()
    yield from learner.strategy.finish()
    learner.transport.close()


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"compress": "int8"}, {"compress": "top-k"}])
@pytest.mark.parametrize("saved_at", [9, 10])
def test_a_run_continues_from_its_state_bit_for_bit(options, saved_at):
    def strategies():
        return [LocalSGD(complete, 5, **options) for _ in range(3)]

    clock, _, learners = world(strategies())
    states = {}

    def saving(learner):
        learner.strategy.attach(Replica(learner.module), learner.transport, Membership.of(3))
        for step in range(20):
            learner.gradient(step)
            yield 1.0
            yield from learner.strategy.before_step()
            learner.optimizer.step()
            yield from learner.strategy.after_step()
            if step + 1 == saved_at:
                yield from learner.strategy.before_saving()
                states[learner.transport.rank] = {
                    "strategy": learner.strategy.state_dict(),
                    "module": {name: value.clone() for name, value in learner.module.state_dict().items()},
                    "optimizer": _copied(learner.optimizer.state_dict()),
                }
        yield from learner.strategy.finish()
        learner.transport.close()

    for learner in learners:
        clock.spawn(saving(learner))
    clock.run()
    clock, _, resumed = world(strategies())
    for rank, learner in enumerate(resumed):
        clock.spawn(_restored(learner, states[rank], 20 - saved_at))
    clock.run()
    assert np.array_equal(weights(resumed), weights(learners))


def _copied(tree):
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return tree


def test_super_learners_with_an_outer_step_between_groups():
    """Two groups of two: the recursion on two learners whose gradients are the means of their groups."""
    clock, _, learners = world([SuperLearner(LocalSGD(complete, 3), 2) for _ in range(4)])
    run(clock, learners, 12)
    H, targets = problem(4)
    p = np.zeros((2, 12))
    phi, m, V = p.copy(), p.copy(), p.copy()
    for _ in range(4):
        for _ in range(3):
            V = MOMENTUM * V + (H * (np.repeat(p, 2, 0) - targets)).reshape(2, 2, 12).mean(1)
            p = p - LR * V
        m = 0.9 * m + p - phi
        phi[:] = (phi + 0.7 * (0.9 * m + p - phi)).mean(0)
        p = phi.copy()
    np.testing.assert_allclose(weights(learners), np.repeat(p, 2, 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_any_optimizer_takes_the_local_steps(optimizer):
    clock, _, learners = world([LocalSGD(complete, 4, 1.0, 0.0) for _ in range(3)])
    alone = world([LocalSGD(complete, 4, 1.0, 0.0)])[2][0]
    for learner in (*learners, alone):
        learner.module.curvature, learner.module.target = learners[0].module.curvature, learners[0].module.target
        learner.optimizer = optimizer(learner.module.parameters(), lr=0.01)
        learner.gradient = lambda step, learner=learner: (learner.optimizer.zero_grad(), learner.module().backward())
    run(clock, learners, 12)
    for step in range(12):
        alone.gradient(step)
        alone.optimizer.step()
    np.testing.assert_allclose(weights(learners), np.tile(alone.module.vector(), (3, 1)), rtol=0, atol=1e-12)


def test_a_step_that_raised_releases_the_weights():
    strategy = LocalSGD("complete", 2)
    _, _, (learner,) = world([strategy])
    strategy.attach(Replica(learner.module), learner.transport, Membership.of(1))
    list(strategy.before_step())
    strategy.abandon()
    with strategy.at_rest():
        list(strategy.before_step())
    list(strategy.after_step())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be at least 1 step, got 0"),
        ({"outer_lr": 0.0}, "outer_lr must be above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum from 0 to below 1"),
        ({"compress": "int4"}, "None, 'int8' or 'top-k', got 'int4'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(StrategyError, match=message):
        LocalSGD(**options)


def test_top_k_needs_the_complete_graph():
    _, _, (learner, *_) = world([LocalSGD("ring", compress="top-k") for _ in range(4)])
    with pytest.raises(StrategyError, match="the topology must be complete"):
        learner.strategy.attach(Replica(learner.module), learner.transport, Membership.of(4))
