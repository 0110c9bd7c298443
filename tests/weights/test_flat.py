"""Flat buffers and their layout."""

import itertools

import torch
from hypothesis import given, strategies as st

from roundelay.weights.flat import ALIGNMENT, Flat, Layout

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


@given(counts=st.lists(st.integers(1, 300), min_size=4, max_size=4))
def test_a_narrowed_layout_has_the_same_numbers_in_the_same_order_and_another_length(counts):
    layout = Layout(dict(zip((torch.float32, torch.float64, torch.bfloat16, torch.int64), counts, strict=True)))
    narrowed = layout.narrowed(torch.float16)
    assert narrowed is layout or narrowed.nbytes < layout.nbytes
    storage = torch.zeros(layout.nbytes, dtype=torch.uint8)
    assert [len(part) for part in narrowed.parts_of(storage)] == counts
    assert [len(part) for part in layout.parts_of(storage)] == counts


def test_float16_weights_beside_float32_ones_are_not_mixed_up():
    layout = Layout({torch.float32: 1000, torch.float16: 1000})
    assert layout.narrowed(torch.float16) is layout
