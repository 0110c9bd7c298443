"""The rendezvous and its lines over real sockets; what it decides is tested in test_desk."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from roundelay.cluster.rendezvous import client as lines
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.cluster.rendezvous.messages import packed
from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
from roundelay.cluster.rendezvous.state import RendezvousState, Run
from roundelay.errors import DroppedError, HandshakeError, RendezvousLostError
from roundelay.transport.security import Security

SECURITY = Security(secrets.token_bytes(32))
RUN = Run(expected=2, parties=(0, 1))
HERE = ("127.0.0.1", 9)


@contextlib.contextmanager
def serving(port=0, desk=None):
    server = RendezvousServer(open_listener("127.0.0.1", port), SECURITY, desk or RendezvousState(time.monotonic))
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def registered(server, *, run=RUN):
    """Two learners that have begun together."""
    with RendezvousClient(server.address, SECURITY) as first, RendezvousClient(server.address, SECURITY) as second:
        with ThreadPoolExecutor(2) as pool:
            terms = [pool.submit(line.register, run, HERE, number) for number, line in enumerate((first, second))]
            assert [term.result(10).membership.living for term in terms] == [(0, 1), (0, 1)]
        yield first, second


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_draws_of_two_learners_are_those_of_one_cursor():
    with serving() as server, registered(server) as (first, second):
        first.begin(5, [1])
        second.begin(5, [1])
        drawn = [first.draw(0, 0, 0), second.draw(1, 0, 0), second.draw(1, 1, 1), first.draw(0, 1, 1)]
        assert drawn == [0, 2, 3, 4]
        assert first.draw(0, 2, 2) is None


def test_all_meet_and_hear_what_each_brings():
    with serving() as server, registered(server) as lines, ThreadPoolExecutor(2) as pool:
        met = [pool.submit(line.meet, 0, f"of {line.id}") for line in lines]
        assert [each.result(10).values for each in met] == [{0: "of 0", 1: "of 1"}] * 2


def test_a_learner_that_is_lost_is_told_to_the_other_with_the_reason():
    with serving() as server, registered(server) as (first, second):
        heard = []
        first.on_term = lambda term, reason: heard.append((term.membership.living, reason))
        second.close("DivergedError: too large")
        wait_until(lambda: heard)
        assert heard == [((0,), "learner 1 died: DivergedError: too large")]


def test_a_stranger_is_refused_and_counted_and_changes_nothing():
    with serving() as server, registered(server) as (first, _):
        with pytest.raises((HandshakeError, ConnectionError)):
            RendezvousClient(server.address, Security(bytes(32)))
        with socket.create_connection(server.address) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        wait_until(lambda: server.refused.counts.total() >= 2)
        first.begin(1, [])
        assert first.draw(0, 0, 0) == 0


@pytest.mark.parametrize("nonsense", [{"kind": "draw"}, {"kind": "register", "n": 1}, {"kind": "meet", "n": 2}])
def test_a_member_that_sends_nonsense_loses_its_connection_and_nothing_else(nonsense):
    with serving() as server, registered(server) as (first, second):
        second._tell(nonsense)
        wait_until(lambda: server.refused.counts.total() == 1)
        first.begin(1, [])
        assert first.draw(0, 0, 0) == 0


def test_while_the_rendezvous_is_away_learners_draw_what_is_theirs_and_come_back(caplog):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving())
        port = server.address[1]
        first, second = stack.enter_context(registered(server))
        for line in (first, second):
            line.begin(9, [])
        assert [first.draw(0, 0, 0), second.draw(1, 0, 0)] == [0, 1]
        server.close()
        wait_until(lambda: not first._connected and not second._connected)
        assert [first.draw(0, 1, 1), second.draw(1, 1, 1), first.draw(0, 2, 2)] == [2, 3, 4]
        with serving(port) as again:
            wait_until(lambda: again.living() == [0, 1] and first._connected and second._connected)
            wait_until(lambda: caplog.text.count("found the rendezvous again") == 2 or first.term.membership.generation)
            drawn = sorted([first.draw(0, 3, 3), second.draw(1, 2, 2)])
            assert drawn == [5, 6]
            for line in (first, second):
                line.close()


def test_a_question_that_needs_the_rendezvous_waits_for_it_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(lines, "STOPPING_S", 0.2)
    with serving() as server, registered(server) as (first, second):
        server.close()
        wait_until(lambda: not first._connected)
        assert first.mark(otherwise=7) == 7
        assert first.last_step(3) == 3
        with pytest.raises(RendezvousLostError, match="away for"):
            first._ask("meet", 0.2, value=None, lost=[], generation=0, address=HERE)
        second.close()


def test_a_learner_that_was_dropped_hears_so_and_may_register_again():
    with serving() as server, registered(server) as (first, second):
        server.died(1, "taken for dead")
        wait_until(lambda: second._dropped is not None)
        with pytest.raises(DroppedError, match="taken for dead"):
            second.check()
        with pytest.raises(DroppedError):
            second.begin(1, [])
        second.register(RUN, HERE, 1)
        assert second.joins
        second.arrived()
        wait_until(lambda: first.term.membership.living == (0, 1))


def test_a_slow_stranger_keeps_nobody_waiting():
    with serving() as server, contextlib.closing(socket.create_connection(server.address)):
        done = threading.Event()
        with registered(server):
            done.set()
        assert done.is_set()


def test_a_message_larger_than_a_packet_arrives_whole():
    with serving() as server, registered(server) as (first, second):
        first.begin(10, [])
        large = list(range(100_000))
        assert len(packed({"kind": "meet", "value": large})) > 2**19
        with ThreadPoolExecutor(2) as pool:
            met = [pool.submit(line.meet, 0, large) for line in (first, second)]
            assert met[0].result(10).values[1] == large
