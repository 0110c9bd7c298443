"""The vectorised path is the per-learner loop, for every strategy of the synchronous family."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from roundelay.clock import VirtualClock
from roundelay.errors import StrategyError
from roundelay.simulation import StackedLearners, VirtualLearner, run
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, SuperLearner
from roundelay.topology import base_graph, random_ring, ring
from roundelay.transport import SimulatedNetwork

N, BATCH, STEPS = 6, 3, 12

STRATEGIES = {
    "allreduce": Allreduce,
    "dpsgd on a ring": lambda: DPSGD(ring(N)),
    "dpsgd on a random ring": lambda: DPSGD(random_ring(N, seed=3)),
    "dpsgd on a base graph": lambda: DPSGD(base_graph(N, 1)),
    "delay-by-one of weights": DelayByOne,
    "delay-by-one of gradients": lambda: DelayByOne(delayed="gradients"),
    "super-learners on a ring": lambda: SuperLearner(DPSGD(ring(3)), group_size=2),
    "super-learners with delay-by-one": lambda: SuperLearner(DelayByOne(), group_size=3),
}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def optimizer(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.3, momentum=0.9, weight_decay=0.01)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(N, BATCH, 5, generator=generator), torch.randint(3, (N, BATCH), generator=generator))
        for _ in range(STEPS)
    ]


def looped(module: nn.Module, strategy_of) -> torch.Tensor:
    clock = VirtualClock()
    network = SimulatedNetwork(clock, N, latency_s=0.01)
    data, learners = batches(), []
    for rank in range(N):
        own = copy.deepcopy(module)
        step = optimizer(list(own.parameters()))

        def gradient(k, own=own, step=step, rank=rank):
            step.zero_grad()
            loss(own, (data[k][0][rank], data[k][1][rank])).backward()

        learners.append(VirtualLearner(own, step, strategy_of(), network.transports[rank], gradient, lambda _: 1.0))
    run(clock, learners, STEPS)
    return torch.stack([nn.utils.parameters_to_vector(learner.module.parameters()).detach() for learner in learners])


@pytest.mark.parametrize("model", [mlp, cnn])
@pytest.mark.parametrize("name", STRATEGIES)
def test_stacked_learners_equal_one_by_one_learners(name, model):
    stacked = StackedLearners(model(), loss, optimizer, STRATEGIES[name](), N)
    for batch in batches():
        stacked.step(batch)
    torch.testing.assert_close(stacked.flat(), looped(model(), STRATEGIES[name]), rtol=1e-6, atol=1e-6)


def test_the_mean_model_has_the_mean_weights_and_its_own_loss():
    stacked = StackedLearners(mlp(), loss, optimizer, DPSGD(ring(N)), N)
    for batch in batches():
        stacked.step(batch)
    mean = mlp()
    mean.load_state_dict(stacked.consensus())
    flat = nn.utils.parameters_to_vector(mean.parameters()).detach()
    torch.testing.assert_close(flat, stacked.flat().mean(dim=0))
    x, y = batches()[0][0][0], batches()[0][1][0]
    assert stacked.consensus_loss((x, y)) == pytest.approx(loss(mean, (x, y)).item(), rel=1e-6)
    assert stacked.spread() == pytest.approx(float((stacked.flat() - flat).norm() / N**0.5), rel=1e-4)


def test_clipping_sees_the_gradients_that_a_user_would_see():
    seen = []
    stacked = StackedLearners(mlp(), loss, optimizer, Allreduce(), N)
    stacked.step(batches()[0], adjust=lambda gradients: seen.extend(g.clone() for g in gradients))
    for gradient in seen:
        torch.testing.assert_close(gradient, gradient[:1].expand_as(gradient))  # the mean, at everyone's


def test_asynchronous_learners_cannot_be_stacked_and_the_error_says_what_to_use():
    with pytest.raises(StrategyError, match="VirtualLearner"):
        StackedLearners(mlp(), loss, optimizer, ADPSGD(ring(N)), N)


def test_a_mixing_of_another_size_is_refused():
    with pytest.raises(StrategyError, match="for 4 learners, not 6"):
        StackedLearners(mlp(), loss, optimizer, DPSGD(ring(4)), N)
