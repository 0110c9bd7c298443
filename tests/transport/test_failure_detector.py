import queue
import socket
import threading

import pytest

from roundelay.transport import failure_detector as watching, heartbeats as pulse
from roundelay.transport.base import LEFT
from roundelay.transport.failure_detector import Event, FailureDetector

PATIENCE_S = 10.0


class Post:
    """A watch whose news a test can wait for."""

    def __init__(self):
        self.news = queue.Queue()
        self.watch = FailureDetector(lambda event, peer, reason: self.news.put((event, peer, reason)))

    def next(self):
        return self.news.get(timeout=PATIENCE_S)


@pytest.fixture
def fast(monkeypatch):
    """Beats every 10 ms, given up after 100."""
    for module in (pulse, watching):
        monkeypatch.setattr(module, "BEAT_S", 0.01)
    monkeypatch.setattr(pulse, "LOST_AFTER_S", 0.1)


@pytest.fixture
def posts():
    made = []

    def make():
        made.append(Post())
        return made[-1]

    yield make
    for post in made:
        if not post.watch._closing:
            post.watch.close()


@pytest.fixture
def line(posts):
    """A watch, and the raw other end of its line to learner 7."""
    post = posts()
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    post.watch.add(7, ours)
    with theirs:
        yield post, theirs


def connected(posts):
    a, b = posts(), posts()
    left, right = socket.socketpair()
    a.watch.add(1, left)
    b.watch.add(0, right)
    return a, b


def test_learners_that_beat_hear_nothing_bad_of_each_other(posts, fast, monkeypatch):
    monkeypatch.setattr(pulse, "LOST_AFTER_S", 0.5)
    a, b = connected(posts)
    with pytest.raises(queue.Empty):
        a.news.get(timeout=1.0)  # twice the silence after which one is given up
    assert b.news.empty()


def test_beats_come_without_being_asked_for(line, fast):
    _, theirs = line
    assert theirs.recv(1) == b"."
    assert theirs.recv(1) == b"."


def test_who_finishes_and_leaves_says_so_in_this_order(posts):
    a, b = connected(posts)
    b.watch.say_finished()
    b.watch.close()
    assert a.next() == (Event.FINISHED, 1, "")
    assert a.next() == (Event.LEFT, 1, LEFT)


def test_who_gives_up_says_why(posts):
    a, b = connected(posts)
    b.watch.close("ValueError: größer als 3")
    assert a.next() == (Event.LOST, 1, "it gave up (ValueError: größer als 3)")


def test_a_very_long_reason_is_cut(posts):
    a, b = connected(posts)
    b.watch.close("é" * 5000)
    event, _, reason = a.next()
    assert event == Event.LOST
    assert len(reason) < 1100


def test_a_line_that_comes_late_hears_what_was_said_before(posts):
    a, b = posts(), posts()
    b.watch.say_finished()
    left, right = socket.socketpair()
    a.watch.add(1, left)
    b.watch.add(0, right)
    assert a.next() == (Event.FINISHED, 1, "")


def test_a_closed_connection_is_a_death(line):
    post, theirs = line
    theirs.close()
    assert post.next() == (Event.LOST, 7, "its process ended")


def test_garbage_on_the_line_is_a_death_and_harms_nobody_else(line):
    post, theirs = line
    ours, other = socket.socketpair()
    post.watch.add(8, ours)
    with other:
        theirs.sendall(b"..POST / HTTP/1.1")
        assert post.next() == (Event.LOST, 7, "it sent what no learner sends")
        other.sendall(b"F")
        assert post.next() == (Event.FINISHED, 8, "")


def test_a_goodbye_in_pieces_is_put_together(line):
    post, theirs = line
    for byte in b".G\x00\x03bad":
        theirs.sendall(bytes([byte]))
    assert post.next() == (Event.LOST, 7, "it gave up (bad)")


def test_a_frozen_peer_is_given_up(line, fast):
    post, _ = line  # the other end stays open and never beats
    event, peer, reason = post.next()
    assert (event, peer) == (Event.LOST, 7)
    assert reason.startswith("no heartbeat for")


def test_a_peer_is_lost_only_once(line, fast):
    post, theirs = line
    theirs.close()
    post.next()
    with pytest.raises(queue.Empty):
        post.news.get(timeout=0.3)


def test_waiting_for_lines(posts):
    post = posts()
    ours, theirs = socket.socketpair()
    with theirs:
        threading.Thread(target=post.watch.add, args=(1, ours)).start()
        assert post.watch.wait_for([1], PATIENCE_S) is None
        assert post.watch.wait_for([1, 3, 2], 0.01) == 2


def test_a_line_that_comes_after_the_end_is_closed(posts):
    post = posts()
    post.watch.close()
    ours, theirs = socket.socketpair()
    with theirs:
        post.watch.add(1, ours)
        assert theirs.recv(1) == b""


def test_close_ends_the_thread(posts):
    post = posts()
    thread = post.watch._thread
    post.watch.close()
    assert not thread.is_alive()


def test_a_goodbye_counts_although_the_connection_broke_behind_it(posts):
    post = posts()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    theirs.sendall(b"G" + bytes(2))
    ours.sendall(b"never read")
    theirs.close()  # with something unread, so that it is a reset and no orderly end
    post.watch.add(7, ours)
    assert post.next() == (Event.LEFT, 7, LEFT)
