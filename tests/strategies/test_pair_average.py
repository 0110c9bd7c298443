import math
import signal
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from loopback import PATIENCE_S
from torch import nn

from roundelay.errors import RefusedError
from roundelay.strategies.pair_average import FairLock, PairAverage
from roundelay.weights import Replica, flat


def weights_of(values):
    """Live weights with these float32 numbers."""
    replica = Replica(nn.ParameterList([nn.Parameter(torch.tensor(values, dtype=torch.float32))]))
    return PairAverage(replica, replica.mirror())


def values_of(weights):
    return weights.flat.parts[0].numpy().copy()


def packed(weights):
    return weights.pack(torch.zeros_like(weights.flat.storage))


small = st.floats(-1e3, 1e3, width=32).map(lambda value: value if abs(value) > 1e-30 else 0.0)


@given(st.lists(st.tuples(small, small), min_size=1, max_size=50), st.sampled_from([2**18, 7]))
def test_both_ends_apply_the_very_correction_that_numpy_computes(pairs, piece):
    s, x = np.array(pairs, np.float32).T
    c = (s - x) * np.float32(1 / 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "PIECE", piece)
        caller, answering = weights_of(s), weights_of(x)
        request, reply = packed(caller), torch.zeros_like(caller.flat.storage)
        answering.answer(0, request, reply)
        caller.take(1, reply)
        np.testing.assert_array_equal(values_of(answering), x + c)
        np.testing.assert_array_equal(values_of(caller), s - c)
        distance2 = float(np.square(s - x, dtype=np.float64).sum())
        assert caller.norm2(1, reply) == pytest.approx(distance2, rel=1e-5, abs=1e-40)
        answering.undo(0, reply)
        np.testing.assert_allclose(values_of(answering), x, rtol=0, atol=1e-3)


def test_what_was_added_before_a_bad_piece_came_is_taken_back(monkeypatch):
    monkeypatch.setattr(flat, "PIECE", 4)
    before = np.linspace(-1, 1, 20, dtype=np.float32)
    weights = weights_of(before)
    request = packed(weights_of(before + 1))
    good = request.clone()
    request.view(torch.float32)[19] = math.nan
    with pytest.raises(RefusedError, match="non-finite weights"):
        weights.answer(1, request, request)
    np.testing.assert_allclose(values_of(weights), before, rtol=0, atol=1e-7)
    weights.answer(1, good, good)
    np.testing.assert_allclose(values_of(weights), before + 1 / 3, rtol=0, atol=1e-6)


def test_weights_of_another_model_are_refused():
    weights = weights_of(np.ones(50))
    with pytest.raises(RefusedError, match="another model"):
        weights.take(1, torch.zeros(64, dtype=torch.uint8))
    assert (values_of(weights) == 1).all()


def test_a_fair_lock_is_handed_over_in_the_order_in_which_threads_came():
    lock, order = FairLock(), []
    lock.acquire()

    def come(number):
        with lock:
            order.append(number)

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=come, args=(number,)))
        threads[-1].start()
        while len(lock._waiting) <= number:  # it has not come to wait yet
            time.sleep(0.001)
    lock.release()
    lock.acquire()  # behind all that wait
    order.append("came again")
    lock.release()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order == [0, 1, 2, 3, 4, "came again"]
    assert not lock.locked()


def test_a_signal_that_interrupts_a_waiter_leaves_the_fair_lock_usable():
    """Ctrl-C while the training thread waits: its turn must not be handed over to it later."""
    lock, main = FairLock(), threading.get_ident()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def signal_the_waiter():
        while not lock._waiting:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGUSR1)

    lock.acquire()
    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=signal_the_waiter)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
    finally:
        thread.join(PATIENCE_S)
        signal.signal(signal.SIGUSR1, before)
    lock.release()
    assert not lock.locked()
