"""The module's weights, and steps that work on a flat buffer."""

import copy

import pytest
import torch
from torch import nn

from roundelay.errors import StrategyError
from roundelay.weights.replica import Replica


def test_tied_weights_are_there_once_and_frozen_ones_not_at_all():
    module = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "frozen": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    module["frozen"].requires_grad_(False)
    assert [tuple(w.shape) for w in Replica(module).weights] == [(3, 3), (3,), (3,)]


def test_a_module_without_trainable_parameters_is_refused():
    with pytest.raises(StrategyError, match="nothing to train"):
        Replica(nn.Linear(2, 2).requires_grad_(False))


def test_copies_follow_the_module_through_a_change_of_dtype():
    module = nn.Linear(3, 2)
    replica = Replica(module)
    flat = replica.mirror()
    before = module.weight.detach().clone()
    module.to(torch.float64)
    flat.storage.zero_()
    replica.copy_to(flat)
    assert torch.equal(flat.views[0], before)
    flat.parts[0].fill_(0.5)
    replica.copy_from(flat)
    assert module.weight.dtype == torch.float64
    assert (module.weight == 0.5).all()


def test_a_copy_into_the_module_keeps_its_storage():
    module = nn.LSTM(3, 4)
    replica = Replica(module)
    places = [w.data_ptr() for w in replica.weights]
    replica.copy_from(replica.mirror())
    assert [w.data_ptr() for w in replica.weights] == places


# Steps on a flat -----------------------------------------------------------------------------------------------------------


def test_during_a_step_the_parameters_are_the_flat_itself():
    module = nn.Linear(3, 2)
    replica = Replica(module)
    flat = replica.mirror()
    own, before = module.weight.data_ptr(), module.weight.detach().clone()
    replica.begin_step(flat)
    assert module.weight.data_ptr() == flat.views[0].data_ptr()
    with torch.no_grad():
        module.weight.add_(1)
    replica.end_step(flat)
    assert torch.equal(flat.views[0], before + 1)
    assert module.weight.data_ptr() == own
    assert torch.equal(module.weight, before), "working weights change only when they are copied in"


def test_an_optimizer_that_puts_new_tensors_in_place_is_followed():
    module = nn.Linear(3, 2)
    replica = Replica(module)
    flat = replica.mirror()
    own, new = module.weight.data_ptr(), torch.randn(2, 3)
    replica.begin_step(flat)
    module.weight.data = new
    replica.end_step(flat)
    assert torch.equal(flat.views[0], new)
    assert module.weight.data_ptr() == own


def test_parameters_of_another_dtype_than_the_flat_are_copied_instead():
    module = nn.Linear(3, 2)
    replica = Replica(module)
    flat = replica.mirror()
    module.to(torch.float64)
    replica.begin_step(flat)
    assert module.weight.dtype == torch.float64
    with torch.no_grad():
        module.weight.fill_(2.0)
    replica.end_step(flat)
    assert (flat.views[0] == 2.0).all()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("kind", ["plain", "groups", "channels_last"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_on_a_flat_as_on_the_modules_own_weights(name, kind):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
    if kind == "channels_last":
        plain = plain.to(memory_format=torch.channels_last)
    stepped = copy.deepcopy(plain)

    def optimizer_of(module):
        parameters = list(module.parameters())
        if kind == "groups":
            return OPTIMIZERS[name]([{"params": parameters[:1], "lr": 0.05}, {"params": parameters[1:]}])
        return OPTIMIZERS[name](parameters)

    optimizers = [optimizer_of(plain), optimizer_of(stepped)]
    replica = Replica(stepped)
    flat = replica.mirror()
    for step in range(5):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        for module, optimizer in zip((plain, stepped), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            if module is stepped:
                replica.begin_step(flat)
                optimizer.step()
                replica.end_step(flat)
                replica.copy_from(flat)
            else:
                optimizer.step()
    for a, b in zip(plain.parameters(), stepped.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_tensors_are_made_anew_only_where_a_parameter_has_other_memory():
    module = nn.Linear(3, 2)
    replica = Replica(module)
    first = replica.tensors()
    assert replica.tensors() is first
    module.weight.data = module.weight.data.clone()
    second = replica.tensors()
    assert second is not first
    assert second[0].data_ptr() == module.weight.data_ptr()
    module.double()
    assert all(tensor.dtype == torch.float64 for tensor in replica.tensors())


def test_after_other_memory_or_another_dtype_steps_still_reach_the_flat():
    module = nn.Linear(3, 2)
    replica = Replica(module)
    flat = replica.mirror()
    for change in (lambda: None, lambda: setattr(module.weight, "data", module.weight.data.clone()), module.double):
        change()
        own = [weight.data_ptr() for weight in replica.weights]
        replica.begin_step(flat)
        with torch.no_grad():
            for weight in replica.weights:
                weight.add_(1.0)
        before = [view.clone() for view in flat.views]
        replica.end_step(flat)
        assert [weight.data_ptr() for weight in replica.weights] == own
        replica.copy_from(flat)
        for weight, view, earlier in zip(replica.weights, flat.views, before, strict=True):
            assert torch.equal(weight.float(), view)
            assert weight.dtype == torch.float64 or torch.equal(view, earlier)
