from __future__ import annotations

import os
import signal
import threading

import pytest
from hypothesis import given, strategies as st

from roundelay.training.stopping import StopRequest


@given(asked_after=st.integers(0, 20), further=st.integers(0, 5))
def test_the_learner_takes_the_steps_that_were_agreed_on_and_no_more(asked_after, further):
    stop = StopRequest(lambda begun: begun + further)
    taken = 0
    while stop.begin_step():
        taken += 1
        if asked_after in (taken, 0):
            stop.request()
    assert taken == max(asked_after, 1) + further


def test_a_signal_requests_a_stop():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = StopRequest(lambda begun: begun)
        stop.listen()
        assert stop.begin_step()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.begin_step()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_learners_in_step_end_with_the_same_step():
    """Each learner has begun another number of steps when it is asked. All end with the largest number."""
    begun, agreed, limit = [], threading.Barrier(3), {}

    def last_step(mine: int) -> int:
        begun.append(mine)
        agreed.wait(10)
        return max(begun)

    stops = [StopRequest(last_step) for _ in range(3)]
    for stop, steps in zip(stops, (3, 5, 4), strict=True):
        for _ in range(steps):
            assert stop.begin_step()
    for stop in stops:
        stop.request()
    for index, stop in enumerate(stops):
        while stop.begin_step():
            pass
        limit[index] = stop._begun
    assert set(limit.values()) == {5}


def test_an_error_while_agreeing_is_raised_by_begin_step():
    def fail(begun: int) -> int:
        raise ConnectionError("the rendezvous is gone")

    stop = StopRequest(fail)
    stop.request()
    with pytest.raises(ConnectionError, match="the rendezvous is gone"):
        stop.begin_step()
