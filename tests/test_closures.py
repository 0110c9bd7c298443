"""`optimizer.step(closure)`: the closure runs first, once, and everything is as after `backward(); step()`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loopback import loopback, together
from torch import nn

from roundelay.errors import StrategyError
from roundelay.hooks import StepHooks
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, SuperLearner
from roundelay.transport.solo import SoloTransport

LEARNERS, STEPS = 2, 6
STRATEGIES = {  # with two learners in lockstep all of them are deterministic but ADPSGD, which runs alone below
    "allreduce": Allreduce,
    "dpsgd": lambda: DPSGD("ring"),
    "delay-by-one": DelayByOne,
    "delayed-gradients": lambda: DelayByOne("gradients"),
    "super-learner": lambda: SuperLearner(DPSGD("ring"), 1),
    "one-super-learner": lambda: SuperLearner(ADPSGD("ring"), 2),
}
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.01),
    "adam-fused": lambda weights: torch.optim.Adam(weights, lr=0.01, fused=True),
}


def model():
    weights = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=weights))
    return module


def loss_of(module, rank, step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + step))
    return (module(x) - rank).square().mean()


def plain_step(module, optimizer, rank, step, losses):
    optimizer.zero_grad()
    loss = loss_of(module, rank, step)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


def closure_step(module, optimizer, rank, step, losses):
    calls = []

    def closure():
        calls.append(step)
        optimizer.zero_grad()
        loss = loss_of(module, rank, step)
        loss.backward()
        return loss

    result = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
    losses.append(result.item())
    assert len(calls) == 1


def trained(strategy, optimizer_of, take_step, rank, transport):
    module, losses = model(), []
    optimizer = optimizer_of(module.parameters())
    with Learner(module, optimizer, strategy, transport):
        for step in range(STEPS):
            take_step(module, optimizer, rank, step, losses)
    return nn.utils.parameters_to_vector(module.parameters()).detach().numpy(), losses


def both(strategy, optimizer_of, take_step):
    """What two learners end with."""
    with loopback(LEARNERS) as transports:
        return together(LEARNERS, lambda rank: trained(strategy(), optimizer_of, take_step, rank, transports[rank]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_with_a_closure_equals_backward_and_step_bit_for_bit(name, optimizer):
    ends = [both(STRATEGIES[name], OPTIMIZERS[optimizer], step) for step in (plain_step, closure_step)]
    for (weights, losses), (expected, expected_losses) in zip(ends[1], ends[0], strict=True):
        assert np.array_equal(weights, expected)
        assert losses == expected_losses


def test_the_same_for_adpsgd_alone():
    ends = [trained(ADPSGD(), OPTIMIZERS["sgd"], step, 0, SoloTransport()) for step in (plain_step, closure_step)]
    assert np.array_equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_the_closure_comes_before_the_mixed_weights():
    """The gradient is taken at the working weights, and the hook before the step finds it."""
    module, log = model(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    StepHooks(optimizer, lambda: log.append(("before", module[0].weight.grad is not None)), lambda: log.append("after"))

    def closure():
        log.append("closure")
        loss = loss_of(module, 0, 0)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert log == ["closure", ("before", True), "after"]


def test_a_closure_that_raises_leaves_no_lock_behind():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def fail():
        raise ZeroDivisionError

    with Learner(module, optimizer, ADPSGD(), SoloTransport()) as learner:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(fail)
        loss_of(module, 0, 0).backward()
        optimizer.step()
        assert learner.steps == 1


class InnerStep(torch.optim.SGD):
    """Calls its closure itself, then torch's step."""

    def step(self, closure=None):
        loss = closure() if closure else None
        super().step()
        return loss


def test_an_optimizer_that_calls_the_closure_in_its_own_step_works():
    module = model()
    optimizer = InnerStep(module.parameters(), lr=0.1)
    with Learner(module, optimizer, ADPSGD(), SoloTransport()):
        losses = []
        closure_step(module, optimizer, 0, 0, losses)
    other = model()
    plain_step(other, torch.optim.SGD(other.parameters(), lr=0.1), 0, 0, [])
    for weight, expected in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, expected)


class Perturbed(torch.optim.SGD):
    """As SAM: takes a second gradient at other weights."""

    def step(self, closure=None):
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.add_(0.01)
        closure()
        return super().step()


@pytest.mark.parametrize("strategy", [ADPSGD, Allreduce])
def test_an_optimizer_that_wants_a_gradient_at_other_weights_is_refused(strategy):
    module = model()
    optimizer = Perturbed(module.parameters(), lr=0.1)
    with (
        pytest.raises(StrategyError, match="Perturbed calls its closure after it has changed the weights"),
        Learner(module, optimizer, strategy(), SoloTransport()),
    ):
        closure_step(module, optimizer, 0, 0, [])
