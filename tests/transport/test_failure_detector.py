import queue
import socket
import threading

import pytest

from roundelay.transport import failure_detector, heartbeats
from roundelay.transport.base import LEFT
from roundelay.transport.failure_detector import Event, FailureDetector

PATIENCE_S = 10.0


class Reporter:
    """A failure detector whose reports a test can wait for."""

    def __init__(self):
        self.reports = queue.Queue()
        self.detector = FailureDetector(lambda event, peer, reason: self.reports.put((event, peer, reason)))

    def next(self):
        return self.reports.get(timeout=PATIENCE_S)


@pytest.fixture
def fast(monkeypatch):
    """A beat every 10 ms; a peer is lost after 100 ms."""
    for module in (heartbeats, failure_detector):
        monkeypatch.setattr(module, "BEAT_S", 0.01)
    monkeypatch.setattr(heartbeats, "LOST_AFTER_S", 0.1)


@pytest.fixture
def reporters():
    made = []

    def make():
        made.append(Reporter())
        return made[-1]

    yield make
    for reporter in made:
        if not reporter.detector._closing:
            reporter.detector.close()


@pytest.fixture
def connection(reporters):
    """A failure detector, and the other end of its connection with learner 7."""
    reporter = reporters()
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    reporter.detector.add(7, ours)
    with theirs:
        yield reporter, theirs


def connected(reporters):
    a, b = reporters(), reporters()
    left, right = socket.socketpair()
    a.detector.add(1, left)
    b.detector.add(0, right)
    return a, b


def test_learners_that_send_heartbeats_report_nothing(reporters, fast, monkeypatch):
    monkeypatch.setattr(heartbeats, "LOST_AFTER_S", 0.5)
    a, b = connected(reporters)
    with pytest.raises(queue.Empty):
        a.reports.get(timeout=1.0)  # twice the silence after which a peer is lost
    assert b.reports.empty()


def test_heartbeats_are_sent_unasked(connection, fast):
    _, theirs = connection
    assert theirs.recv(1) == b"."
    assert theirs.recv(1) == b"."


def test_a_peer_that_finishes_and_leaves_says_so_in_this_order(reporters):
    a, b = connected(reporters)
    b.detector.say_finished()
    b.detector.close()
    assert a.next() == (Event.FINISHED, 1, "")
    assert a.next() == (Event.LEFT, 1, LEFT)


def test_a_peer_that_gives_up_says_why(reporters):
    a, b = connected(reporters)
    b.detector.close("ValueError: größer als 3")
    assert a.next() == (Event.LOST, 1, "it gave up (ValueError: größer als 3)")


def test_a_very_long_reason_is_cut(reporters):
    a, b = connected(reporters)
    b.detector.close("é" * 5000)
    event, _, reason = a.next()
    assert event == Event.LOST
    assert len(reason) < 1100


def test_a_connection_that_is_added_late_hears_what_was_said_before(reporters):
    a, b = reporters(), reporters()
    b.detector.say_finished()
    left, right = socket.socketpair()
    a.detector.add(1, left)
    b.detector.add(0, right)
    assert a.next() == (Event.FINISHED, 1, "")


def test_a_peer_whose_connection_closes_is_lost(connection):
    reporter, theirs = connection
    theirs.close()
    assert reporter.next() == (Event.LOST, 7, "its process ended")


def test_a_peer_that_sends_garbage_is_lost_and_no_other(connection):
    reporter, theirs = connection
    ours, other = socket.socketpair()
    reporter.detector.add(8, ours)
    with other:
        theirs.sendall(b"..POST / HTTP/1.1")
        assert reporter.next() == (Event.LOST, 7, "it sent what no learner sends")
        other.sendall(b"F")
        assert reporter.next() == (Event.FINISHED, 8, "")


def test_a_goodbye_in_pieces_is_put_together(connection):
    reporter, theirs = connection
    for byte in b".G\x00\x03bad":
        theirs.sendall(bytes([byte]))
    assert reporter.next() == (Event.LOST, 7, "it gave up (bad)")


def test_a_frozen_peer_is_lost(connection, fast):
    reporter, _ = connection  # the other end stays open and never beats
    event, peer, reason = reporter.next()
    assert (event, peer) == (Event.LOST, 7)
    assert reason.startswith("no heartbeat for")


def test_a_peer_is_lost_only_once(connection, fast):
    reporter, theirs = connection
    theirs.close()
    reporter.next()
    with pytest.raises(queue.Empty):
        reporter.reports.get(timeout=0.3)


def test_wait_for_names_the_first_peer_that_has_not_connected(reporters):
    reporter = reporters()
    ours, theirs = socket.socketpair()
    with theirs:
        threading.Thread(target=reporter.detector.add, args=(1, ours)).start()
        assert reporter.detector.wait_for([1], PATIENCE_S) is None
        assert reporter.detector.wait_for([1, 3, 2], 0.01) == 2


def test_a_connection_that_is_added_after_close_is_closed(reporters):
    reporter = reporters()
    reporter.detector.close()
    ours, theirs = socket.socketpair()
    with theirs:
        reporter.detector.add(1, ours)
        assert theirs.recv(1) == b""


def test_close_ends_the_thread(reporters):
    reporter = reporters()
    thread = reporter.detector._thread
    reporter.detector.close()
    assert not thread.is_alive()


def test_a_goodbye_counts_although_the_connection_broke_after_it(reporters):
    reporter = reporters()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    theirs.sendall(b"G" + bytes(2))
    ours.sendall(b"never read")
    theirs.close()  # with unread bytes, so TCP sends a reset
    reporter.detector.add(7, ours)
    assert reporter.next() == (Event.LEFT, 7, LEFT)


def test_a_connection_that_replaces_another_one_closes_it_and_no_peer_is_lost(connection):
    reporter, before = connection
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    reporter.detector.add(7, ours)
    while before.recv(100):  # beats that were sent earlier
        pass
    with theirs:
        assert theirs.recv(1) == b"."
        assert reporter.reports.empty()


def test_a_peer_that_is_given_up_is_told_why(reporters):
    a, b = connected(reporters)
    a.detector.give_up(1, "no more weights")
    event, _, reason = b.next()
    assert (event, reason) == (Event.LOST, "it gave up (no more weights)")
