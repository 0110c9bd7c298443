import numpy as np
import pytest
import torch
from torch import nn
from worlds import LR, MOMENTUM, problem, train, weights, world

from roundelay.cluster.membership import Membership
from roundelay.errors import PeerLostError
from roundelay.simulation import run
from roundelay.strategies import Allreduce, allreduce
from roundelay.transport.solo import SoloTransport
from roundelay.weights.replica import Replica


def mean_gradient_recursion(steps):
    """x <- x - alpha v,  v <- beta v + mean over the active of g_j(x); a learner that has finished keeps its weights."""
    H, targets = problem(len(steps))
    X, v = np.zeros_like(targets), np.zeros(targets.shape[1])
    for k in range(max(steps)):
        active = np.array(steps) > k
        v = MOMENTUM * v + (H * (X - targets))[active].mean(0)
        X[active] -= LR * v
    return X


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_allreduce_equals_sgd_on_the_mean_gradient(size):
    clock, _, learners = world([Allreduce() for _ in range(size)], compute_s=lambda rank, _: 1.0 + rank)
    run(clock, learners, 40)
    np.testing.assert_allclose(weights(learners), mean_gradient_recursion([40] * size), rtol=0, atol=1e-12)
    assert learners[0].strategy.metrics()["rounds"] == 40


def test_learners_that_have_finished_leave_the_mean_to_the_others():
    steps = [4, 9, 0, 7]
    clock, network, learners = world([Allreduce() for _ in range(4)])
    train(clock, network, learners, steps)
    np.testing.assert_allclose(weights(learners), mean_gradient_recursion(steps), rtol=0, atol=1e-12)


def test_every_learner_hears_of_a_dead_one():
    clock, network, learners = world([Allreduce() for _ in range(4)])
    with pytest.raises(PeerLostError, match="lost learner 3"):
        train(clock, network, learners, [50] * 4, kill={3: 3.3})


def test_buckets_hold_every_weight_once_in_the_order_of_backward(monkeypatch):
    monkeypatch.setattr(allreduce, "FIRST_BUCKET_BYTES", 100)
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 400)
    module = nn.Sequential(*(nn.Linear(5, 5) for _ in range(8)))
    module[3].to(torch.float64)
    replica = Replica(module)
    buckets = allreduce._bucket_indices(replica)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(16))
    assert buckets[0] == [15], "the first is small, so that communication starts early"
    for bucket in buckets:
        assert len({replica.weights[index].dtype for index in bucket}) == 1
        assert bucket == sorted(bucket, reverse=True)
        assert sum(replica.weights[index].nbytes for index in bucket) <= 400


def test_a_weight_that_no_learner_used_keeps_no_gradient():
    module = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    strategy = Allreduce()
    strategy.attach(Replica(module), SoloTransport(), Membership.of(1))
    module["used"](torch.ones(2)).sum().backward()
    for _ in strategy.after_backward():
        pass
    assert module["unused"].weight.grad is None
    assert torch.equal(module["used"].weight.grad, torch.ones(1, 2))


def test_a_weight_that_one_learner_used_gets_the_mean_everywhere():
    clock, _, learners = world([Allreduce() for _ in range(2)])
    for rank, learner in enumerate(learners):

        def gradient(step, rank=rank, module=learner.module):
            module.head.grad = torch.full_like(module.head, 4.0) if rank == 0 else None
            module.tail.grad = None

        learner.gradient = gradient
    run(clock, learners, 1)
    assert (learners[1].module.head.grad == 2.0).all()
    assert learners[0].module.tail.grad is None
