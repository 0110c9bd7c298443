import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from roundelay.errors import RefusedError
from roundelay.strategies.pair_average import PairAverage
from roundelay.weights import Replica, flat


def weights_of(values, wire=None):
    """Live weights with these float32 numbers."""
    replica = Replica(nn.ParameterList([nn.Parameter(torch.tensor(values, dtype=torch.float32))]))
    return PairAverage(replica, replica.mirror(), wire)


def values_of(weights):
    return weights.flat.parts[0].numpy().copy()


def exchange(caller, answering, pieces=None):
    """An exchange that breaks off after so many pieces, or is complete; the caller's end of it."""
    buffer = torch.zeros_like(caller.flat.storage)
    with caller.call(1, buffer, buffer) as ours:
        for k in range(len(ours.pieces)):
            ours.prepare(k)
        message = buffer[: ours.nbytes].clone()
        with answering.answer(0, message, message) as theirs:
            for k in range(len(theirs.pieces)):
                if k == pieces:
                    raise ConnectionError("cut")
                theirs.apply(k)
                ours.pieces[k].copy_(theirs.pieces[k])
                ours.apply(k)
    return ours


small = st.floats(-1e3, 1e3, width=32).map(lambda value: value if abs(value) > 1e-30 else 0.0)


@given(st.lists(st.tuples(small, small), min_size=1, max_size=50), st.sampled_from([2**18, 7]))
def test_both_ends_apply_a_third_of_the_difference_as_numpy_does(pairs, piece):
    s, x = np.array(pairs, np.float32).T
    c = (s - x) * np.float64(np.float32(1 / 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "PIECE", piece)
        caller, answering = weights_of(s), weights_of(x)
        end = exchange(caller, answering)
        # Whether torch rounds once or twice depends on the processor.
        ulp = np.spacing(np.maximum(np.abs(s), np.abs(x)))
        assert (np.abs(values_of(answering) - (x + c)) <= ulp).all()
        assert (np.abs(values_of(caller) - (s - c)) <= ulp).all()
        distance2 = float(np.square(s - x, dtype=np.float64).sum())
        assert end.distance2 == pytest.approx(distance2, rel=1e-5, abs=1e-40)


@pytest.mark.parametrize("wire", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pieces", range(5))
def test_what_was_applied_before_an_exchange_breaks_off_is_taken_back_at_both_ends(pieces, wire, monkeypatch):
    monkeypatch.setattr(flat, "PIECE", 20)
    rng = np.random.default_rng(pieces)
    values = rng.standard_normal((2, 100)).astype(np.float32)
    ends = [weights_of(each, wire) for each in values]
    with pytest.raises(ConnectionError, match="cut"):
        exchange(*ends, pieces=pieces)
    np.testing.assert_allclose([values_of(end) for end in ends], values, rtol=0, atol=1e-6)
    exchange(*ends)
    np.testing.assert_allclose(sum(map(values_of, ends)), values.sum(0), rtol=0, atol=1e-6)
    assert np.abs(values_of(ends[0]) - values_of(ends[1])).max() < 0.4 * np.abs(values[0] - values[1]).max()


def test_what_was_added_before_a_bad_piece_came_is_taken_back_at_both_ends(monkeypatch):
    monkeypatch.setattr(flat, "PIECE", 4)
    before = np.linspace(-1, 1, 20, dtype=np.float32)
    bad = before + 1
    bad[19] = math.nan
    caller, answering = weights_of(bad), weights_of(before)
    with pytest.raises(RefusedError, match="non-finite weights"):
        exchange(caller, answering)
    np.testing.assert_allclose(values_of(answering), before, rtol=0, atol=1e-7)
    np.testing.assert_allclose(values_of(caller), bad, rtol=0, atol=1e-7)
    exchange(weights_of(before + 1), answering)
    np.testing.assert_allclose(values_of(answering), before + 1 / 3, rtol=0, atol=1e-6)


def test_weights_of_another_model_are_refused():
    weights, other = weights_of(np.ones(50)), torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(RefusedError, match="another model"):
        weights.answer(1, other, other)
    assert (values_of(weights) == 1).all()
