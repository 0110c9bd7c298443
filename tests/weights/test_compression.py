import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from roundelay.weights.compression import BLOCK, TOP_K, ErrorFeedback, Int8, TopK

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def parts_of(lengths, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator).to(dtype) for length in lengths]


def int8_in_numpy(values):
    """The formula of the docstring, block by block, independently of torch."""
    found = np.empty_like(values)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        scale = np.float32(np.abs(block).max() / np.float32(127))
        found[start : start + BLOCK] = np.round(block / scale) * scale if scale else 0
    return found


@pytest.mark.parametrize("length", [1, 7, BLOCK, BLOCK + 1, 1000])
def test_int8_equals_its_formula_in_numpy(length):
    (values,) = parts_of([length])
    (decoded,) = Int8().decode(Int8().encode([values]), like=[values])
    np.testing.assert_array_equal(decoded.numpy(), int8_in_numpy(values.numpy()))


@settings(max_examples=50)
@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False), min_size=1, max_size=300))
def test_int8_is_off_by_at_most_half_a_step_of_its_block(values):
    exact = torch.tensor(values, dtype=torch.float32)
    (decoded,) = Int8().decode(Int8().encode([exact]), like=[exact])
    for start in range(0, len(values), BLOCK):
        block, found = exact[start : start + BLOCK].double(), decoded[start : start + BLOCK].double()
        assert ((block - found).abs() <= block.abs().max() / 127 * 0.5001 + 1e-40).all()


@pytest.mark.parametrize("compression", [Int8(), TopK()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_any_length_and_dtype_come_back_in_their_places(compression, dtype):
    parts = [*parts_of([5, 0, 333], dtype=dtype), torch.ones(3)]
    decoded = compression.decode(compression.encode(parts), like=parts)
    assert [(len(part), part.dtype) for part in decoded] == [(len(part), part.dtype) for part in parts]
    assert torch.equal(decoded[3].nonzero().flatten() % 3, torch.arange(len(decoded[3].nonzero())))


def test_top_k_keeps_the_largest_numbers_as_they_are():
    (values,) = parts_of([1024])
    (decoded,) = TopK().decode(TopK().encode([values]), like=[values])
    kept = decoded.nonzero().flatten()
    assert len(kept) == 1024 * TOP_K
    assert torch.equal(decoded[kept], values[kept])
    assert values[kept].abs().min() >= values[decoded == 0].abs().max()


def test_how_many_bytes_they_take():
    (values,) = parts_of([2**16])
    assert len(Int8().encode([values])) == 2**16 * (1 + 4 / BLOCK)
    assert len(TopK().encode([values])) == 2**16 * TOP_K * 8


@pytest.mark.parametrize("compression", [Int8(), TopK()])
def test_error_feedback_loses_nothing(compression):
    """After every message: all that was sent, and what is still kept back, are all that was given."""
    feedback = ErrorFeedback(compression, parts_of([700], dtype=torch.float64))
    given_so_far = sent_so_far = torch.zeros(700, dtype=torch.float64)
    for step in range(20):
        (values,) = parts_of([700], seed=step, dtype=torch.float64)
        data, (sent,) = feedback.encode([values])
        assert torch.equal(compression.decode(data, [values])[0], sent), "what a peer sees"
        given_so_far, sent_so_far = given_so_far + values, sent_so_far + sent
        torch.testing.assert_close(sent_so_far + feedback.residual[0], given_so_far, rtol=0, atol=1e-12)


def test_a_constant_stream_arrives_on_average_as_it_was_given():
    """Without feedback, top-k would send the same numbers for ever and never the others."""
    (values,) = parts_of([640])
    feedback, total = ErrorFeedback(TopK(), [values]), torch.zeros(640)
    for _ in range(400):
        total += feedback.encode([values])[1][0]
    torch.testing.assert_close(total / 400, values, rtol=0, atol=0.35)
    assert (total != 0).float().mean() > 0.95


def test_non_finite_numbers_stay_non_finite():
    values = torch.tensor([1.0, float("nan"), 2.0])
    assert not torch.isfinite(Int8().decode(Int8().encode([values]), [values])[0]).all()


@pytest.mark.parametrize("compression", [Int8(), TopK()])
def test_bytes_of_other_weights_are_refused(compression):
    data = compression.encode(parts_of([640]))
    with pytest.raises(ValueError, match="these parts take"):
        compression.decode(data, parts_of([2000]))


def test_positions_outside_of_the_weights_are_refused():
    (values,) = parts_of([64])
    data = TopK().encode([values])
    data[8:12] = torch.tensor([255, 255, 0, 0], dtype=torch.uint8)  # the first position, after two float32
    with pytest.raises(ValueError, match="outside of the 64 numbers"):
        TopK().decode(data, [values])
