"""The same promises on GPUs; skipped where there are none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne
from roundelay.topology import ring
from roundelay.transport.solo import SoloTransport
from roundelay.weights import AcceleratorReplica, Flat, replica_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(strategy, device: str) -> torch.Tensor:
    """Twenty steps of one learner; what the weights are then."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    batches = torch.Generator().manual_seed(1)
    with Learner(module, optimizer, strategy, SoloTransport()):
        for _ in range(20):
            module(torch.randn(32, 8, generator=batches).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([weight.detach().cpu().flatten() for weight in module.parameters()])


@pytest.mark.parametrize("strategy_of", [Allreduce, DelayByOne, lambda: DPSGD(ring(1)), lambda: ADPSGD(ring(1))])
def test_a_gpu_learns_what_the_cpu_learns(strategy_of):
    torch.testing.assert_close(trained(strategy_of(), "cuda"), trained(strategy_of(), "cpu"), rtol=1e-4, atol=1e-5)


def test_the_mirror_is_pinned_and_follows_a_step():
    module = nn.Linear(300, 300).cuda()
    replica = replica_of(module)
    assert isinstance(replica, AcceleratorReplica)
    mirror = replica.mirror(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
    assert mirror.storage.is_pinned()
    before = module.weight.detach().clone()
    correction = torch.ones_like(mirror.pieces[0]).pin_memory()
    mirror.pieces[0].add_(correction)
    replica.correct(0, correction, 1.0)
    replica.wait_until_corrected()
    replica.begin_step(mirror)
    with torch.no_grad():
        module.weight.mul_(2.0)
    replica.end_step(mirror)
    replica.wait_until_readable()
    torch.testing.assert_close(module.weight.detach(), 2 * (before + 1))
    torch.testing.assert_close(mirror.views[0], module.weight.detach().cpu(), rtol=0, atol=0)


def test_collectives_reduce_on_the_device():
    module = nn.Linear(10, 10).cuda()
    strategy = Allreduce()
    with Learner(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy, SoloTransport()):
        assert all(bucket.flat.storage.is_cuda for bucket in strategy._buckets)
    assert Flat([module.weight.detach()], on="cuda").storage.is_cuda
