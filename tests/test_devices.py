"""Which accelerator a learner uses. There is none here, so torch's device-agnostic functions are replaced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from roundelay import devices
from roundelay.cluster.environment import World
from roundelay.transport import collectives


@pytest.fixture
def two_of(monkeypatch):
    """Gives this machine two accelerators of a kind."""

    def pretend(kind):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        module = SimpleNamespace(get_device_name=lambda index: f"{kind} number {index}")
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    return pretend


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_learners_are_spread_over_the_accelerators_of_a_machine(two_of, kind):
    two_of(kind)
    assert [World(rank, 4, rank, 4).device for rank in range(4)] == [
        torch.device(kind, index) for index in (0, 1, 0, 1)
    ]
    assert devices.names() == [f"{kind} number 0", f"{kind} number 1"]


def test_without_an_accelerator_learners_use_the_cpu():
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert World(0, 1, 0, 1).device == torch.device("cpu")
    assert devices.names() == []


@pytest.mark.parametrize(
    ("kind", "backends"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")]
)
def test_every_kind_of_tensor_has_the_backend_that_torch_has_for_it(kind, backends):
    assert collectives.backends(kind) == backends
