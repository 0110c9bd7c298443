import numpy as np
import pytest
import torch
from worlds import LR, MOMENTUM, problem, recursion, train, weights, world

from roundelay.cluster.membership import Membership
from roundelay.errors import PeerLostError, StrategyError
from roundelay.simulation import run
from roundelay.strategies import DelayByOne
from roundelay.weights.replica import Replica


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_delayed_weights_equal_the_recursion_with_the_global_mean(size):
    clock, _, learners = world([DelayByOne() for _ in range(size)], compute_s=lambda rank, _: 1.0 + rank)
    run(clock, learners, 40)
    J = np.full((size, size), 1 / size)
    np.testing.assert_allclose(weights(learners), recursion(lambda k: J, 40, size), rtol=0, atol=1e-12)
    assert learners[0].strategy.metrics()["rounds"] == 40


def delayed_gradients(steps):
    """x <- x - alpha v,  v <- beta v + mean of g_j(x_{k-1}) over those that took step k - 1; the first is zero."""
    H, targets = problem(len(steps))
    X, V = np.zeros_like(targets), np.zeros_like(targets)
    late = np.zeros(targets.shape[1])
    for k in range(max(steps)):
        active = np.array(steps) > k
        G = H * (X - targets)
        V[active] = MOMENTUM * V[active] + late
        X[active] -= LR * V[active]
        late = G[active].mean(0)
    return X


@pytest.mark.parametrize("steps", [[30], [30, 30], [30] * 4, [5, 9, 1, 7]])
def test_delayed_gradients_equal_pipelined_sgd(steps):
    clock, network, learners = world([DelayByOne("gradients") for _ in steps])
    train(clock, network, learners, steps)
    np.testing.assert_allclose(weights(learners), delayed_gradients(steps), rtol=0, atol=1e-12)


def test_learners_that_have_finished_stay_in_the_mean_with_their_last_weights():
    steps = [3, 9, 0, 12]
    clock, network, learners = world([DelayByOne() for _ in range(4)], compute_s=lambda rank, _: 1.0 + rank)
    train(clock, network, learners, steps)
    H, targets = problem(4)
    X, V = np.zeros_like(targets), np.zeros_like(targets)
    for k in range(max(steps)):
        active = np.array(steps)[:, None] > k
        V = np.where(active, MOMENTUM * V + H * (X - targets), V)
        X = np.where(active, X.mean(0) - LR * V, X)
    np.testing.assert_allclose(weights(learners), X, rtol=0, atol=1e-12)


@pytest.mark.parametrize("delayed", ["weights", "gradients"])
def test_every_learner_hears_of_a_dead_one(delayed):
    clock, network, learners = world([DelayByOne(delayed) for _ in range(3)])
    with pytest.raises(PeerLostError, match="lost learner 1"):
        train(clock, network, learners, [50] * 3, kill={1: 3.3})


def _process(learner, steps, *, raises_at=None, restored=None):
    learner.strategy.attach(Replica(learner.module), learner.transport, Membership.of(learner.transport.size))
    if restored is not None:
        row = torch.tensor(restored[learner.transport.rank])
        with torch.no_grad():
            learner.module.head.copy_(row[:6])
            learner.module.tail.copy_(row[6:])
        learner.strategy.load_state_dict(learner.strategy.state_dict())
    for step in range(steps):
        learner.gradient(step)
        yield 1.0
        yield from learner.strategy.before_step()
        if step == raises_at:
            yield from learner.strategy.before_step()
        learner.optimizer.step()
        yield from learner.strategy.after_step()
    yield from learner.strategy.finish()
    learner.transport.close()


def test_a_step_that_raised_is_tried_again_with_the_same_mean():
    clock, _, learners = world([DelayByOne() for _ in range(3)])
    for rank, learner in enumerate(learners):
        clock.spawn(_process(learner, 20, raises_at=4 if rank == 1 else None))
    clock.run()
    J = np.full((3, 3), 1 / 3)
    np.testing.assert_allclose(weights(learners), recursion(lambda k: J, 20, 3), rtol=0, atol=1e-12)


def test_a_loaded_state_goes_on_with_the_weights_of_the_module():
    clock, _, learners = world([DelayByOne() for _ in range(3)], momentum=0.0)
    restored = np.random.default_rng(1).standard_normal((3, 12))
    for learner in learners:
        clock.spawn(_process(learner, 4, restored=restored))
    clock.run()
    H, targets = problem(3)
    X = restored
    for _ in range(4):
        X = X.mean(0) - LR * H * (X - targets)
    np.testing.assert_allclose(weights(learners), X, rtol=0, atol=1e-12)


def test_an_unknown_value_of_delayed_is_refused():
    with pytest.raises(StrategyError, match="'weights' or 'gradients', got 'momentum'"):
        DelayByOne("momentum")
