import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from worlds import LR, MOMENTUM, problem, recursion, train, weights, world

from roundelay.cluster.membership import Membership
from roundelay.errors import PeerLostError, TopologyError
from roundelay.simulation import run
from roundelay.strategies import DPSGD
from roundelay.strategies.dpsgd import spread
from roundelay.topology import complete, random_ring, ring
from roundelay.topology.registry import TOPOLOGIES, named
from roundelay.transport.solo import SoloTransport
from roundelay.weights.replica import Replica

STEPS = 30


def possible(sizes):
    for name, size in itertools.product(TOPOLOGIES, sizes):
        try:
            named(name, size, degree=2)
        except TopologyError:
            continue
        yield name, size


@pytest.mark.parametrize(("name", "size"), list(possible([1, 2, 3, 4, 6, 8])))
def test_dpsgd_equals_the_matrix_recursion_on_every_topology(name, size):
    mixing = named(name, size, seed=5, degree=2)
    clock, _, learners = world([DPSGD(named(name, size, seed=5, degree=2)) for _ in range(size)])
    run(clock, learners, STEPS)
    expected = recursion(mixing.matrix, STEPS, size)
    np.testing.assert_allclose(weights(learners), expected, rtol=0, atol=1e-12)


@settings(max_examples=15)
@given(times=st.lists(st.floats(0.0, 10.0), min_size=8, max_size=8), latency_s=st.floats(0.0, 3.0))
def test_how_long_steps_and_messages_take_changes_nothing(times, latency_s):
    pace = lambda rank, step: times[(3 * rank + step) % 8]  # noqa: E731
    clock, _, learners = world([DPSGD(random_ring(4, seed=2)) for _ in range(4)], compute_s=pace, latency_s=latency_s)
    run(clock, learners, 12)
    expected = recursion(random_ring(4, seed=2).matrix, 12, 4)
    np.testing.assert_allclose(weights(learners), expected, rtol=0, atol=1e-12)


def test_equal_seeds_give_equal_bits():
    def result():
        clock, _, learners = world(
            [DPSGD(random_ring(5, seed=1)) for _ in range(5)], compute_s=lambda r, k: 1 + 0.1 * r
        )
        run(clock, learners, STEPS)
        return weights(learners)

    assert np.array_equal(result(), result())


def test_learners_that_have_finished_stay_in_the_mean_with_their_last_weights():
    steps, mixing = [3, 9, 6, 12], ring(4)
    clock, network, learners = world([DPSGD(ring(4)) for _ in range(4)], compute_s=lambda rank, _: 1.0 + rank)
    train(clock, network, learners, steps)
    H, targets = problem(4)
    X, V = np.zeros_like(targets), np.zeros_like(targets)
    for k in range(max(steps)):
        active = np.array(steps)[:, None] > k
        V = np.where(active, MOMENTUM * V + H * (X - targets), V)
        X = np.where(active, mixing.matrix(k) @ X - LR * V, X)
    np.testing.assert_allclose(weights(learners), X, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_neighbour_of_a_dead_learner_raises_and_names_it(dead):
    clock, network, learners = world([DPSGD(ring(4)) for _ in range(4)])
    with pytest.raises(PeerLostError, match=f"lost learner {dead}") as caught:
        train(clock, network, learners, [50] * 4, kill={dead: 3.3})
    assert caught.value.peer == dead
    assert clock.now() <= 5.0, "at the second step after its death: the first had its weights already"


def test_a_step_that_raised_is_tried_again_without_mixing_twice():
    clock, _, learners = world([DPSGD(ring(3)) for _ in range(3)])

    def process(learner, steps):
        learner.strategy.attach(Replica(learner.module), learner.transport, Membership.of(3))
        for step in range(steps):
            learner.gradient(step)
            yield 1.0
            yield from learner.strategy.before_step()
            if step == 4 and learner.transport.rank == 1:  # this step raises: its after_step never comes
                learner.strategy.abandon()
                yield from learner.strategy.before_step()
            learner.optimizer.step()
            yield from learner.strategy.after_step()
        yield from learner.strategy.finish()
        learner.transport.close()

    for learner in learners:
        clock.spawn(process(learner, STEPS))
    clock.run()
    np.testing.assert_allclose(weights(learners), recursion(ring(3).matrix, STEPS, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("loaded_round", [0, 7])
def test_a_loaded_state_goes_on_in_its_round_with_the_weights_of_the_module(loaded_round):
    mixing = random_ring(4, seed=9)
    clock, _, learners = world([DPSGD(random_ring(4, seed=9)) for _ in range(4)], momentum=0.0)
    rng = np.random.default_rng(1)
    restored = rng.standard_normal((4, 12))

    def process(learner, steps):
        learner.strategy.attach(Replica(learner.module), learner.transport, Membership.of(4))
        row = torch.tensor(restored[learner.transport.rank])
        with torch.no_grad():
            learner.module.head.copy_(row[:6])
            learner.module.tail.copy_(row[6:])
        learner.strategy.load_state_dict({"round": loaded_round})
        for step in range(steps):
            learner.gradient(step)
            yield 1.0 + learner.transport.rank
            yield from learner.strategy.before_step()
            learner.optimizer.step()
            yield from learner.strategy.after_step()
        assert learner.strategy.state_dict() == {"round": loaded_round + steps}
        yield from learner.strategy.finish()
        learner.transport.close()

    for learner in learners:
        clock.spawn(process(learner, 5))
    clock.run()
    H, targets = problem(4)
    X = restored
    for k in range(loaded_round, loaded_round + 5):
        X = mixing.matrix(k) @ X - LR * H * (X - targets)
    np.testing.assert_allclose(weights(learners), X, rtol=0, atol=1e-12)


def test_spread_is_estimated_from_what_neighbours_send():
    """On a complete graph every learner sees all others, so the mean over learners of the estimates squared is exact."""
    clock, _, learners = world([DPSGD(complete(4)) for _ in range(4)])
    for learner in learners:
        clock.spawn(learner.process(20))
    clock.run(until=10.5)
    for learner in learners:
        learner.strategy.metrics()  # asks for a measurement of the next swap
    clock.run(until=11.5)
    X = weights(learners)
    estimates = np.array([learner.strategy.metrics()["spread"] for learner in learners])
    exact = np.sqrt(((X - X.mean(0)) ** 2).sum(1).mean())
    assert np.sqrt((estimates**2).mean()) == pytest.approx(exact, rel=1e-9)


def test_spread_of_two_points_a_distance_apart():
    assert spread(4.0, 2) == pytest.approx(1.0)  # |x_0 - x_1| = 2: each is 1 from the mean
    assert spread(4.0, 1) == 0.0


def test_a_mixing_for_other_learners_than_are_here_is_refused():
    with pytest.raises(TopologyError, match=r"ring\(4\) is for 4 learners, but there are 1"):
        DPSGD(ring(4)).attach(Replica(torch.nn.Linear(1, 1)), SoloTransport(), Membership.of(1))
