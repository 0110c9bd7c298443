import copy
import io
import itertools
import logging
import math
import mmap
import os
import threading

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from roundelay.errors import StrategyError
from roundelay.transport.shared_memory import SharedMemory
from roundelay.weights import replica as replica_module
from roundelay.weights.replica import ALIGNMENT, Flat, Layout, Replica

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


@pytest.mark.parametrize("shown", [False, True], ids=["copied", "shown"])
@pytest.mark.parametrize("kind", ["plain", "groups", "channels_last"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_on_lent_weights_as_on_its_own(name, kind, shown, memory):
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
    flat = shadowed(replica, memory) if shown else replica.flat()
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
    assert bool(replica.shown) == (shown and kind != "channels_last")
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


# Shadows -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    memory = SharedMemory()
    yield memory
    memory.close()


def shadowed(replica, memory):
    """A flat with a copy of the weights, which has a shadow."""
    flat = replica.flat(memory.allocate)
    return flat.cast(memory.shadow(flat.storage))


def step(replica, flat, change=1.0):
    """As an optimizer's between the hooks; whether the module's weights are behind."""
    replica.lend(flat)
    with torch.no_grad():
        for weight in replica.weights:
            weight.add_(change)
    return replica.take_back(flat)


@pytest.fixture
def shown(memory):
    """A module whose weights are shown, the flat, and a second one that can be."""
    module = nn.Sequential(nn.Linear(40, 50), nn.LSTM(50, 8))
    replica = Replica(module)
    flat, other = shadowed(replica, memory), shadowed(replica, memory)
    assert not step(replica, flat, 0.0)
    assert replica.shown is flat
    return replica, flat, other


def assert_equal(weights, views):
    for weight, view in zip(weights, views, strict=True):
        assert torch.equal(weight, view)


def test_after_a_step_the_module_shows_the_flat_and_its_own_memory_is_free(memory):
    module = nn.Linear(300, 20)
    replica = Replica(module)
    before, own = module.weight.detach().clone(), StorageWeakRef(module.weight.untyped_storage())
    flat = shadowed(replica, memory)
    assert not step(replica, flat), "nothing is to be copied"
    assert replica.shown is flat
    assert torch.equal(module.weight, before + 1)
    assert torch.equal(flat.views[0], before + 1)
    assert own.expired()
    flat.views[0].zero_()
    assert (module.weight == 0).all(), "it is the flat's memory"


def test_what_a_user_writes_is_seen_by_the_module_only_and_gone_after_the_next_step(shown):
    replica, flat, other = shown
    before = [view.clone() for view in flat.views]
    replica.weights[0].data.zero_()
    with torch.no_grad():
        replica.weights[2].fill_(math.nan)
    assert (replica.weights[0] == 0).all()
    assert_equal(flat.views, before)
    assert not step(replica, other)
    assert not step(replica, flat)
    assert_equal(replica.weights, [view + 1 for view in before])


def test_what_was_written_is_gone_when_the_same_flat_is_shown_again(shown):
    replica, flat, _ = shown
    before = [view.clone() for view in flat.views]
    replica.weights[0].data.zero_()
    replica.copy_from(flat)
    assert_equal(replica.weights, before)


KEEPERS = {
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "row": lambda weight: weight.detach()[0],
    "numpy": lambda weight: weight.detach().numpy(),
    "tensor on the storage": lambda weight: torch.empty(0).set_(weight.untyped_storage()),
    "storage": lambda weight: weight.untyped_storage(),
}


def _seen(kept):
    return torch.empty(0).set_(kept) if isinstance(kept, torch.UntypedStorage) else torch.as_tensor(kept)


@pytest.mark.parametrize("when", ["before", "while shown"])
@pytest.mark.parametrize("name", KEEPERS)
def test_who_keeps_a_view_sees_every_later_step(name, when, memory, caplog):
    module = nn.Linear(30, 20)
    replica = Replica(module)
    flats = [shadowed(replica, memory) for _ in range(2)]
    view = KEEPERS[name](module.weight) if when == "before" else None
    with caplog.at_level(logging.INFO, "roundelay"):
        for k in range(6):
            flat = flats[k % 2]
            flat.read([other_view.clone() for other_view in flats[(k + 1) % 2].views])
            if step(replica, flat):
                replica.copy_from(flat)
            if view is None and k == 2:
                assert replica.shown is flat
                view = KEEPERS[name](module.weight)
            if view is not None:
                seen = _seen(view).flatten()
                assert torch.equal(seen, module.weight.detach().flatten()[: len(seen)])
                assert torch.equal(module.weight, flat.views[0])
    assert replica.shown is None
    assert caplog.text.count("somebody keeps views onto them") == 1
    flats[0].storage.zero_()
    flats[1].storage.zero_()
    assert not (module.weight == 0).any(), "it has memory of its own now"


def test_weights_that_other_processes_share_stay_where_they_are(memory):
    module = nn.Linear(30, 20)
    module.share_memory()
    place = module.weight.data_ptr()
    replica = Replica(module)
    flat = shadowed(replica, memory)
    assert step(replica, flat)
    assert module.weight.data_ptr() == place


def test_weights_in_memory_that_is_not_torchs_stay_where_they_are(memory):
    array, module = np.ones((20, 30), np.float32), nn.Linear(30, 20)
    module.weight.data = torch.from_numpy(array)
    replica = Replica(module)
    flat = shadowed(replica, memory)
    if step(replica, flat):
        replica.copy_from(flat)
    assert (array == 2).all()


def test_weights_that_are_written_to_between_all_steps_get_memory_of_their_own(shown, caplog):
    """For the kernel copies page by page, which is slower than to copy all of them."""
    replica, *flats = shown
    with caplog.at_level(logging.INFO, "roundelay"):
        for k in range(12):
            for weight in replica.weights:
                weight.data.mul_(0.5)
            if step(replica, flats[k % 2]):
                replica.copy_from(flats[k % 2])
            assert_equal(replica.weights, flats[k % 2].views)
    assert replica.shown is None
    assert "written to between steps" in caplog.text


def test_a_shadow_that_the_kernel_copies_at_once_is_none(memory, monkeypatch):
    """As mlockall makes it do."""
    monkeypatch.setattr(mmap, "MAP_PRIVATE", mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert memory.shadow(memory.allocate(100)) is None


def test_without_a_count_of_users_weights_stay_where_they_are(memory, monkeypatch):
    monkeypatch.setattr(replica_module, "_use_count", None)
    replica = Replica(nn.Linear(3, 2))
    assert not replica.can_show(shadowed(replica, memory))


def test_a_graph_is_refused_also_if_no_step_has_come_but_other_weights(shown):
    replica, _, other = shown
    other.storage.zero_()
    loss = (replica.weights[0] ** 2).sum()
    replica.copy_from(other)
    assert replica.shown is other
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_from_before_a_step_is_refused_as_it_is_without_a_learner(shown):
    replica, _, other = shown
    loss = replica.module[0](torch.randn(3, 40, requires_grad=True)).sum()
    step(replica, other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.double(),
        lambda module: module.share_memory(),
        lambda module: setattr(module[0].weight, "data", torch.ones(50, 40)),
        lambda module: module[1]._apply(lambda tensor: tensor.clone()),
    ],
    ids=["double", "share_memory", "one", "some"],
)
def test_who_moves_parameters_about_finds_them_there_after_the_next_steps(shown, change):
    replica, flat, other = shown
    change(replica.module)
    places, dtype = [weight.data_ptr() for weight in replica.weights], replica.weights[0].dtype
    for k, live in enumerate([other, flat, other]):
        if step(replica, live):
            replica.copy_from(live)
        assert [weight.data_ptr() for weight in replica.weights] == places
        assert replica.weights[0].dtype == dtype
        assert_equal([weight.float() for weight in replica.weights], live.views)
        (flat, other)[k % 2].storage.zero_()
    assert any((weight != 0).any() for weight in replica.weights)


def test_in_the_end_weights_have_memory_of_their_own(shown):
    replica, flat, _ = shown
    before = [view.clone() for view in flat.views]
    replica.move_out()
    flat.storage.zero_()
    assert_equal(replica.weights, before)
    assert replica.shown is None
    assert step(replica, flat), "for good"


def test_in_the_end_who_keeps_a_view_still_has_it(shown):
    replica, flat, _ = shown
    view, before = replica.weights[0].detach(), flat.views[0].clone()
    replica.move_out()
    flat.storage.zero_()
    assert torch.equal(view, before)
    replica.weights[0].data.fill_(3.0)
    assert (view == 3).all()


def test_a_child_has_the_weights_of_when_it_was_forked(shown):
    replica, flat, _ = shown
    expected = [view.clone() for view in flat.views]
    go, change = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(go, 1)
            same = all(map(torch.equal, replica.weights, expected))
            os._exit(0 if same else 1)
        finally:
            os._exit(2)
    flat.storage.zero_()
    os.write(change, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(go)
    os.close(change)


def test_a_fork_in_another_thread_changes_nothing(shown, monkeypatch):
    monkeypatch.setattr(replica_module, "MOST_WRITES", math.inf)  # for which pages that are kept are taken
    replica, *flats = shown
    ended = threading.Event()

    def fork():
        while not ended.is_set():
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)

    thread = threading.Thread(target=fork)
    thread.start()
    try:
        for k in range(150):
            flat = flats[k % 2]
            assert not step(replica, flat)
            assert_equal(replica.weights, flat.views)
    finally:
        ended.set()
        thread.join()


def test_copies_and_files_of_shown_weights_are_those_of_ordinary_ones(shown):
    replica, flat, _ = shown
    twin = copy.deepcopy(replica.module)
    file, ordinary = io.BytesIO(), io.BytesIO()
    torch.save(replica.weights[0], file)
    torch.save(nn.Parameter(replica.weights[0].detach().clone()), ordinary)
    state = safetensors.torch.save(replica.module.state_dict())
    flat.storage.zero_()
    assert len(file.getvalue()) == len(ordinary.getvalue()), "not the whole flat"
    file.seek(0)
    assert torch.equal(torch.load(file), next(twin.parameters()))
    for name, value in safetensors.torch.load(state).items():
        assert torch.equal(value, twin.state_dict()[name])
