"""What integrations save of one learner beside the mean model."""

from __future__ import annotations

import copy

import torch
from torch import nn

from roundelay import ADPSGD, Learner
from roundelay.integrations.learner_state import learner_state, resume
from roundelay.transport.solo import SoloTransport


class Tied(nn.Module):
    """A frozen part, a buffer, and one parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.last(self.first(self.frozen(x))) * self.scale


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        module(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def made(seed: int) -> Learner:
    torch.manual_seed(seed)
    module = Tied()
    return Learner(module, torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9), ADPSGD(), SoloTransport())


def test_the_state_has_what_is_trained_and_buffers_once():
    with made(0) as learner:
        saved = learner_state(learner)
        assert saved["module"].keys() == {"first.weight", "first.bias", "last.bias", "scale"}
        before = copy.deepcopy(saved)
        trained(learner.module, learner.optimizer, 1)
        torch.testing.assert_close(saved, before, rtol=0, atol=0)


def test_a_learner_that_resumes_takes_the_same_steps():
    with made(0) as learner:
        trained(learner.module, learner.optimizer, 3)
        saved = learner_state(learner)
        trained(learner.module, learner.optimizer, 2)
    with made(1) as other:
        other.module.frozen.load_state_dict(learner.module.frozen.state_dict())
        resume(other, saved, "here")
        assert other.steps == 3
        trained(other.module, other.optimizer, 2)
    torch.testing.assert_close(other.module.state_dict(), learner.module.state_dict(), rtol=0, atol=0)


def test_a_state_of_another_number_of_learners_is_not_taken(caplog):
    with made(0) as learner:
        saved = learner_state(learner) | {"learners": 2}
        before = copy.deepcopy(learner.module.state_dict())
        trained(learner.module, learner.optimizer, 1)
        resume(learner, saved, "here")
        assert "learner 0 begins with the mean model: not all learners have a state in here" in caplog.text
        assert not torch.equal(learner.module.state_dict()["first.weight"], before["first.weight"])
