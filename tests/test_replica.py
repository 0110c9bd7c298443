import copy
import itertools

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from roundelay.errors import StrategyError
from roundelay.replica import ALIGNMENT, Flat, Layout, Replica

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)), min_size=1, max_size=8
    ),
    seed=st.integers(0, 99),
)
def test_a_flat_returns_what_it_read_whatever_the_shapes_and_dtypes(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in shapes]
    flat = Flat(tensors)
    flat.read(tensors)
    returned = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    flat.write(returned)
    assert all(torch.equal(a, b) for a, b in zip(tensors, returned, strict=True))


@given(sizes=st.lists(st.integers(1, 70), min_size=1, max_size=6))
def test_parts_are_aligned_disjoint_and_hold_every_number_once(sizes):
    tensors = [torch.ones(size, dtype=DTYPES[index % 4]) for index, size in enumerate(sizes)]
    flat = Flat(tensors)
    flat.read(tensors)
    base = flat.storage.data_ptr()
    assert all((part.data_ptr() - base) % ALIGNMENT == 0 for part in flat.parts)
    assert sum(part.numel() for part in flat.parts) == sum(sizes)
    assert all(float(part.float().sum()) == part.numel() for part in flat.parts)
    ends = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in flat.parts)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_a_flat_is_zero_at_first_also_between_its_parts():
    dirty = torch.full((4 * ALIGNMENT,), 255, dtype=torch.uint8)
    flat = Flat([torch.ones(3), torch.ones(3, dtype=torch.float64)], lambda nbytes: dirty[:nbytes])
    assert not flat.storage.any()


def test_a_peers_storage_is_read_with_our_layout():
    tensors = [torch.randn(3), torch.randn(5, dtype=torch.float64), torch.randn(2, 2)]
    flat, theirs = Flat(tensors), Flat(tensors)
    theirs.read(tensors)
    assert all(
        torch.equal(a, b) for a, b in zip(flat.layout.parts_of(theirs.storage.clone()), theirs.parts, strict=True)
    )


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
    flat = replica.flat()
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
    replica.copy_from(replica.flat())
    assert [w.data_ptr() for w in replica.weights] == places


# Lending -----------------------------------------------------------------------------------------------------------


def test_what_changes_lent_weights_changes_the_flat_without_a_copy():
    module = nn.Linear(3, 2)
    replica = Replica(module)
    flat = replica.flat()
    own, before = module.weight.data_ptr(), module.weight.detach().clone()
    replica.lend(flat)
    assert module.weight.data_ptr() == flat.views[0].data_ptr()
    with torch.no_grad():
        module.weight.add_(1)
    assert replica.take_back(flat)
    assert torch.equal(flat.views[0], before + 1)
    assert module.weight.data_ptr() == own
    assert torch.equal(module.weight, before), "working weights change only when they are copied in"


def test_an_optimizer_that_puts_new_tensors_in_place_is_followed():
    module = nn.Linear(3, 2)
    replica = Replica(module)
    flat = replica.flat()
    own, new = module.weight.data_ptr(), torch.randn(2, 3)
    replica.lend(flat)
    module.weight.data = new
    replica.take_back(flat)
    assert torch.equal(flat.views[0], new)
    assert module.weight.data_ptr() == own


def test_parameters_of_another_dtype_than_the_flat_are_copied_instead():
    module = nn.Linear(3, 2)
    replica = Replica(module)
    flat = replica.flat()
    module.to(torch.float64)
    replica.lend(flat)
    assert module.weight.dtype == torch.float64
    with torch.no_grad():
        module.weight.fill_(2.0)
    assert not replica.take_back(flat), "the parameters have the new values"
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
def test_every_optimizer_steps_on_lent_weights_as_on_its_own(name, kind):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
    if kind == "channels_last":
        plain = plain.to(memory_format=torch.channels_last)
    lent = copy.deepcopy(plain)

    def optimizer_of(module):
        parameters = list(module.parameters())
        if kind == "groups":
            return OPTIMIZERS[name]([{"params": parameters[:1], "lr": 0.05}, {"params": parameters[1:]}])
        return OPTIMIZERS[name](parameters)

    optimizers = [optimizer_of(plain), optimizer_of(lent)]
    replica = Replica(lent)
    flat = replica.flat()
    for step in range(5):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        for module, optimizer in zip((plain, lent), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            if module is lent:
                replica.lend(flat)
                optimizer.step()
                if replica.take_back(flat):
                    replica.copy_from(flat)
            else:
                optimizer.step()
    for a, b in zip(plain.parameters(), lent.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@given(counts=st.lists(st.integers(1, 300), min_size=4, max_size=4))
def test_a_narrowed_layout_has_the_same_numbers_in_the_same_order_and_another_length(counts):
    layout = Layout(dict(zip((torch.float32, torch.float64, torch.bfloat16, torch.int64), counts, strict=True)))
    narrowed = layout.narrowed()
    assert narrowed is layout or narrowed.nbytes < layout.nbytes
    storage = torch.zeros(layout.nbytes, dtype=torch.uint8)
    assert [len(part) for part in narrowed.parts_of(storage)] == counts
    assert [len(part) for part in layout.parts_of(storage)] == counts


def test_float16_weights_beside_float32_ones_are_not_mixed_up():
    layout = Layout({torch.float32: 1000, torch.float16: 1000})
    assert layout.narrowed() is layout


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


def test_after_other_memory_or_another_dtype_the_flat_is_still_lent():
    module = nn.Linear(3, 2)
    replica = Replica(module)
    flat = replica.flat()
    for change in (lambda: None, lambda: setattr(module.weight, "data", module.weight.data.clone()), module.double):
        change()
        own = [weight.data_ptr() for weight in replica.weights]
        replica.lend(flat)
        with torch.no_grad():
            for weight in replica.weights:
                weight.add_(1.0)
        before = [view.clone() for view in flat.views]
        behind = replica.take_back(flat)
        assert [weight.data_ptr() for weight in replica.weights] == own
        if behind:
            replica.copy_from(flat)
        for weight, view, earlier in zip(replica.weights, flat.views, before, strict=True):
            assert torch.equal(weight.float(), view)
            assert weight.dtype == torch.float64 or torch.equal(view, earlier)
