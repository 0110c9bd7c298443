"""Stacked learners give the bits of the strategies that they stand for, run one learner at a time on the virtual clock."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from roundelay.clock import VirtualClock
from roundelay.errors import StrategyError
from roundelay.simulation import StackedLearners, VirtualLearner, run
from roundelay.simulation.stacked import StackedAllreduce, StackedDelayByOne, StackedDPSGD
from roundelay.strategies import DPSGD, Allreduce, DelayByOne
from roundelay.topology import base_graph, complete, named, random_ring, ring, star
from roundelay.transport import SimulatedNetwork

N, BATCH, STEPS = 6, 3, 12

PAIRS = {
    "allreduce": (StackedAllreduce, Allreduce),
    "delay-by-one": (StackedDelayByOne, DelayByOne),
    "dpsgd ring": (lambda: StackedDPSGD(ring(N)), lambda: DPSGD(ring(N))),
    "dpsgd random-ring": (lambda: StackedDPSGD(random_ring(N, 3)), lambda: DPSGD(random_ring(N, 3))),
    "dpsgd base graph": (lambda: StackedDPSGD(base_graph(N, 1)), lambda: DPSGD(base_graph(N, 1))),
    "dpsgd star": (lambda: StackedDPSGD(star(N)), lambda: DPSGD(star(N))),  # unequal numbers of neighbours
    "dpsgd complete": (lambda: StackedDPSGD(complete(N)), lambda: DPSGD(complete(N))),
}


class Elementwise(nn.Module):
    """A loss whose gradient is computed number by number, so that one learner and a batch of learners get equal bits."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(7, 5, generator=generator))
        self.b = nn.Parameter(torch.randn(11, generator=generator))

    def forward(self, targets: Tensor) -> Tensor:
        """Half the squared distance from the targets (46 numbers), with unequal curvatures."""
        a, b = targets[:35].view(7, 5), targets[35:]
        return 0.7 * ((self.a - a) * (self.a - a)).sum() + 0.3 * ((self.b - b) * (self.b - b)).sum()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def own_loss(module: nn.Module, targets: Tensor) -> Tensor:
    return module(targets)


def cross_entropy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def optimizer(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01)


def targets() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(N, 46, generator=generator) for _ in range(STEPS)]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(N, BATCH, 5, generator=generator), torch.randint(3, (N, BATCH), generator=generator))
        for _ in range(STEPS)
    ]


def of_learner(batch, rank):
    return batch[rank] if isinstance(batch, Tensor) else tuple(part[rank] for part in batch)


def stacked(module: nn.Module, loss, data, strategy) -> Tensor:
    learners = StackedLearners(module, loss, optimizer, strategy, N)
    for batch in data:
        learners.step(batch)
    return learners.flat()


def one_by_one(module: nn.Module, loss, data, strategy_of) -> Tensor:
    clock = VirtualClock()
    network, learners = SimulatedNetwork(clock, N, latency_s=0.01), []
    for rank in range(N):
        own = copy.deepcopy(module)
        step = optimizer(list(own.parameters()))

        def gradient(k, own=own, step=step, rank=rank):
            step.zero_grad()
            loss(own, of_learner(data[k], rank)).backward()

        learners.append(VirtualLearner(own, step, strategy_of(), network.transports[rank], gradient, lambda _: 1.0))
    run(clock, learners, STEPS)
    return torch.stack([nn.utils.parameters_to_vector(learner.module.parameters()).detach() for learner in learners])


@pytest.mark.parametrize("name", PAIRS)
def test_with_equal_gradients_stacked_learners_give_the_bits_of_the_strategy(name):
    stacked_strategy_of, strategy_of = PAIRS[name]
    fast = stacked(Elementwise(), own_loss, targets(), stacked_strategy_of())
    assert torch.equal(fast, one_by_one(Elementwise(), own_loss, targets(), strategy_of))
    assert not torch.equal(fast[0], fast[1]) or name == "allreduce"  # the learners do differ


@pytest.mark.parametrize("model", [mlp, cnn])
@pytest.mark.parametrize("name", ["allreduce", "delay-by-one", "dpsgd random-ring"])
def test_batched_gradients_are_those_of_the_learners_up_to_rounding(name, model):
    stacked_strategy_of, strategy_of = PAIRS[name]
    fast = stacked(model(), cross_entropy, batches(), stacked_strategy_of())
    slow = one_by_one(model(), cross_entropy, batches(), strategy_of)
    torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-6)


def test_the_mean_model_has_the_mean_weights_and_its_own_loss():
    learners = StackedLearners(mlp(), cross_entropy, optimizer, StackedDPSGD(ring(N)), N)
    for batch in batches():
        learners.step(batch)
    mean = mlp()
    mean.load_state_dict(learners.consensus())
    flat = nn.utils.parameters_to_vector(mean.parameters()).detach()
    torch.testing.assert_close(flat, learners.flat().mean(dim=0))
    x, y = batches()[0][0][0], batches()[0][1][0]
    assert learners.consensus_loss((x, y)) == pytest.approx(cross_entropy(mean, (x, y)).item(), rel=1e-6)
    assert learners.spread() == pytest.approx(float((learners.flat() - flat).norm() / N**0.5), rel=1e-4)


def test_clipping_sees_the_mean_gradient_of_allreduce():
    seen = []
    learners = StackedLearners(mlp(), cross_entropy, optimizer, StackedAllreduce(), N)
    learners.step(batches()[0], adjust=lambda gradients: seen.extend(g.clone() for g in gradients))
    assert seen
    for gradient in seen:
        assert torch.equal(gradient, gradient[:1].expand_as(gradient))


def test_a_mixing_of_another_size_is_refused():
    learners = StackedLearners(mlp(), cross_entropy, optimizer, StackedDPSGD(named("ring", 4)), N)
    with pytest.raises(StrategyError, match="has 4 learners, but 6 train"):
        learners.step(batches()[0])
