"""Which peers are gone, and the futures that fail with them."""

import threading
from concurrent.futures import Future

import pytest

from roundelay.errors import PeerLostError
from roundelay.transport.base import LEFT
from roundelay.transport.liveness import Liveness


def error_of(future):
    return str(future.exception(timeout=0)) if future.done() else None


def test_what_depends_on_a_lost_peer_fails_and_names_it():
    liveness = Liveness()
    ours, others = liveness.depending_on((1, 2)), liveness.depending_on((3,))
    assert liveness.lose(2, "its process ended")
    assert error_of(ours) == "lost learner 2: its process ended"
    assert not others.done()
    assert error_of(liveness.depending_on((2,))) == "lost learner 2: its process ended"


def test_the_first_reason_counts():
    liveness = Liveness()
    assert liveness.lose(1, "frozen")
    assert not liveness.lose(1, "its connection broke")
    assert liveness.lost == {1: "frozen"}


def test_a_peer_that_left_fails_what_begins_now_but_not_what_is_under_way():
    liveness = Liveness()
    under_way: Future[None] = Future()
    liveness.depending_on((1,), under_way)
    liveness.lose(1, LEFT, left=True)
    assert not under_way.done()
    assert not liveness.depending_on((1,), Future()).done()
    assert error_of(liveness.depending_on((1,))) == f"lost learner 1: {LEFT}"


def test_an_admitted_peer_is_not_lost():
    liveness = Liveness()
    liveness.lose(1, "frozen")
    assert liveness.hopeless((0, 1))
    liveness.admit(1)
    assert not liveness.hopeless((0, 1))
    liveness.raise_if_lost(1)
    assert not liveness.depending_on((1,)).done()


def test_a_failure_fails_everything_now_and_later():
    liveness = Liveness()
    pending = liveness.depending_on(())
    liveness.fail(ZeroDivisionError("in a handler"))
    liveness.fail(ValueError("later"))
    for future in (pending, liveness.depending_on(())):
        assert error_of(future) == "in a handler"
    with pytest.raises(ZeroDivisionError):
        liveness.check()
    assert liveness.hopeless((0,))


def test_a_reason_is_waited_for_until_it_is_known_or_we_close():
    liveness = Liveness()
    threading.Timer(0.01, lambda: liveness.lose(1, "its process ended")).start()
    assert liveness.reason(1, timeout_s=30.0) == "its process ended"
    assert liveness.reason(2, timeout_s=0.0) is None
    threading.Timer(0.01, liveness.close).start()
    assert liveness.reason(2, timeout_s=30.0) is None
    with pytest.raises(PeerLostError, match="this learner has closed"):
        liveness.raise_if_lost(2)
