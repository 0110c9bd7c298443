import math
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from loopback import PATIENCE_S

from roundelay.errors import RefusedError
from roundelay.strategies import pair_average as live
from roundelay.strategies.pair_average import FairLock, PairAverage
from roundelay.weights.replica import Flat


def weights_of(values):
    """Live weights with these float32 numbers, which send them in full precision."""
    flat = Flat([torch.empty(len(values))])
    flat.parts[0].copy_(torch.as_tensor(values))
    return PairAverage(flat, full_precision=True)


def values_of(weights):
    return weights.whole().parts[0].numpy().copy()


def packed(weights):
    return weights.pack(torch.zeros_like(weights.flat.storage))


# Halving is exact but for subnormal numbers, which differences of these are not.
small = st.floats(-1e3, 1e3, width=32).map(lambda value: value if abs(value) > 1e-30 else 0.0)


@given(st.lists(st.tuples(small, small), min_size=1, max_size=50), st.sampled_from([2**18, 7]))
def test_two_that_meet_add_and_subtract_half_of_what_numpy_says_they_differ_by(pairs, piece):
    s, x = np.array(pairs, np.float32).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "PIECE", piece)
        caller, answering = weights_of(s), weights_of(x)
        request, reply = packed(caller), torch.zeros_like(caller.flat.storage)
        answering.answer(0, request, reply)
        caller.take(1, reply)
    d = s - x
    np.testing.assert_array_equal(values_of(answering), x + d / 2)
    np.testing.assert_array_equal(values_of(caller), s - d / 2)
    assert caller.norm2(1, reply) == pytest.approx(float(np.square(d, dtype=np.float64).sum()), rel=1e-5)
    answering.take_back(0, reply)
    np.testing.assert_allclose(values_of(answering), x, rtol=0, atol=1e-3)


def test_the_pieces_of_a_buffer_are_those_of_that_buffer_also_after_others_came():
    weights = weights_of(np.zeros(50))
    for value in range(2 * live.BUFFERS):  # more than are remembered, each freed before the next one is made
        reply = packed(weights_of(np.full(50, value)))
        before = values_of(weights)
        weights.take(1, reply)
        np.testing.assert_array_equal(values_of(weights), before - value / 2)
    assert len(weights._known) <= live.BUFFERS


def test_memory_of_others_is_not_kept_once_they_are_gone():
    weights = weights_of(np.zeros(50))
    reply = packed(weights)
    weights.take(1, reply)
    assert weights._known
    weights.forget()
    assert not weights._known


def test_what_was_added_before_a_bad_piece_came_is_taken_back(monkeypatch):
    monkeypatch.setattr(live, "PIECE", 4)
    before = np.linspace(-1, 1, 20, dtype=np.float32)
    weights = weights_of(before)
    request = packed(weights_of(before + 1))
    good = request.clone()
    request.view(torch.float32)[19] = math.nan
    with pytest.raises(RefusedError, match="non-finite weights"):
        weights.answer(1, request, request)
    np.testing.assert_allclose(values_of(weights), before, rtol=0, atol=1e-7)
    weights.answer(1, good, good)
    np.testing.assert_allclose(values_of(weights), before + 0.5, rtol=0, atol=1e-6)


def test_weights_of_another_model_are_refused():
    weights = weights_of(np.ones(50))
    with pytest.raises(RefusedError, match="another model"):
        weights.take(1, torch.zeros(64, dtype=torch.uint8))
    assert (values_of(weights) == 1).all()


def test_who_has_waited_for_a_fair_lock_gets_it_before_the_one_who_has_just_released_it():
    lock, order = FairLock(), []
    lock.acquire()
    waiting = threading.Thread(target=lambda: (lock.acquire(), order.append("waited"), lock.release()))
    waiting.start()
    while not lock._entry.locked():  # it has not come to wait yet
        time.sleep(0.001)
    lock.release()
    lock.acquire()
    order.append("came again")
    lock.release()
    waiting.join(PATIENCE_S)
    assert order == ["waited", "came again"]
    assert not lock.locked()
