"""Modules and optimizers that a Learner refuses or unwraps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from roundelay.checks import refuse_ddp, refuse_ddp_around, unwrapped_optimizer
from roundelay.errors import StrategyError
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, Allreduce
from roundelay.transport.solo import SoloTransport


@pytest.fixture
def group():
    """A process group of one, as DDP needs it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_a_module_in_ddp_is_refused(group):
    wrapped = DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(StrategyError, match=r"the module is wrapped in DistributedDataParallel.*averaged twice"):
        Learner(wrapped, sgd(wrapped), ADPSGD(), SoloTransport())


def test_a_part_in_ddp_is_refused_by_name(group):
    module = nn.ModuleDict({"head": nn.Linear(2, 1), "body": DistributedDataParallel(nn.Linear(2, 2))})
    with pytest.raises(StrategyError, match="'body' of the module is wrapped in DistributedDataParallel"):
        refuse_ddp(module)


def test_data_parallel_is_refused():
    with pytest.raises(StrategyError, match="wrapped in DataParallel"):
        refuse_ddp(DataParallel(nn.Linear(2, 1)))


@pytest.mark.parametrize("order", ["before the learner", "after the learner"])
def test_a_module_that_ddp_wraps_is_refused_at_the_first_step(group, order):
    module = nn.Linear(2, 1)
    optimizer = sgd(module)
    wrapped = DistributedDataParallel(module) if order == "before the learner" else None
    learner = Learner(module, optimizer, ADPSGD(), SoloTransport())
    wrapped = wrapped or DistributedDataParallel(module)
    before = module.weight.detach().clone()
    wrapped(torch.ones(1, 2)).sum().backward()
    with pytest.raises(StrategyError, match="the Learner's module is wrapped in DistributedDataParallel"):
        optimizer.step()
    assert torch.equal(module.weight, before)
    learner.close()


def test_ddp_around_another_module_does_no_harm(group):
    other = DistributedDataParallel(nn.Linear(2, 1))
    refuse_ddp_around(nn.Linear(2, 1))
    with pytest.raises(StrategyError):
        refuse_ddp_around(other.module)


def test_without_a_process_group_nothing_is_searched(monkeypatch):
    monkeypatch.setattr("gc.get_objects", lambda: pytest.fail("searched"))
    refuse_ddp_around(nn.Linear(2, 1))


@pytest.mark.parametrize("given", ["adpsgd", ADPSGD, None])
def test_what_is_no_strategy_is_refused(given):
    module = nn.Linear(2, 1)
    with pytest.raises(StrategyError, match=r"needs a strategy, such as roundelay\.ADPSGD\(\), got "):
        Learner(module, sgd(module), given, SoloTransport())


@pytest.mark.parametrize(("strategy", "warned"), [(ADPSGD, True), (Allreduce, False)])
def test_sync_batchnorm_is_warned_of_if_it_ends_asynchrony(strategy, warned, caplog):
    module = nn.SyncBatchNorm(2)
    with Learner(module, sgd(module), strategy(), SoloTransport()):
        assert ("SyncBatchNorm makes all learners wait" in caplog.text) == warned


def test_a_torch_optimizer_is_taken_as_it_is():
    optimizer = sgd(nn.Linear(2, 1))
    assert unwrapped_optimizer(optimizer) is optimizer


def test_optimizers_of_lightning_are_unwrapped():
    core = pytest.importorskip("lightning.pytorch.core.optimizer")
    optimizer = sgd(nn.Linear(2, 1))
    wrapped = core.LightningOptimizer(optimizer)
    assert unwrapped_optimizer(wrapped) is optimizer


def test_optimizers_of_accelerate_are_unwrapped():
    accelerate = pytest.importorskip("accelerate")
    module = nn.Linear(2, 1)
    optimizer = sgd(module)
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    assert wrapped is not optimizer
    assert unwrapped_optimizer(wrapped) is optimizer
    with Learner(module, wrapped, ADPSGD(), SoloTransport()) as learner:
        module(torch.ones(1, 2)).sum().backward()
        wrapped.step()
        assert learner.steps == 1


def test_what_is_no_torch_optimizer_is_named():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    module = nn.Linear(2, 1)
    with pytest.raises(StrategyError, match=r"needs a torch\.optim\.Optimizer.*Wrapper; if it wraps"):
        Learner(module, Wrapper(sgd(module)), ADPSGD(), SoloTransport())


def test_lbfgs_is_refused():
    module = nn.Linear(2, 1)
    with pytest.raises(StrategyError, match="LBFGS evaluates the loss several times"):
        Learner(module, torch.optim.LBFGS(module.parameters()), ADPSGD(), SoloTransport())


def test_what_is_no_module_is_refused():
    with pytest.raises(StrategyError, match=r"a Learner needs a torch.nn.Module, got 'model'"):
        refuse_ddp("model")
