"""The emulated model sleeps in forward and in backward, and its gradients have full size."""

from __future__ import annotations

import pytest
import torch

from roundelay.bench import models


@pytest.fixture
def slept(monkeypatch):
    sleeps = []
    monkeypatch.setattr(models.time, "sleep", sleeps.append)
    return sleeps


def test_a_third_of_a_step_is_forward_and_the_rest_is_spread_over_backward(slept):
    model, batch = models.build("emulated", 8000, step_s=0.6)
    loss = model(batch()).sum()
    assert slept == [pytest.approx(0.2)]
    loss.backward()
    assert slept[1:] == [pytest.approx(0.05)] * models.LAYERS
    assert sum(slept) == pytest.approx(0.6)


def test_gradients_come_layer_by_layer_from_the_last_to_the_first(slept):
    model, batch = models.build("emulated", 8000, step_s=0.1)
    order = []
    for index, weight in enumerate(model.parameters()):
        weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append((index, len(slept))))
    model(batch()).sum().backward()
    assert [index for index, _ in order] == list(reversed(range(models.LAYERS)))
    assert [sleeps for _, sleeps in order] == list(
        range(2, models.LAYERS + 2)
    )  # each after its own part of the backward pass
    assert sum(weight.grad.numel() for weight in model.parameters()) == 8000


def test_the_lstm_computes_finite_gradients_and_never_sleeps(slept):
    model, batch = models.build("lstm", 100_000, step_s=0.02)
    model(batch()).sum().backward()
    assert not slept
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())
