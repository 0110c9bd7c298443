"""The rendezvous and its clients over real sockets. What the rendezvous decides is tested in test_state."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from roundelay.cluster.rendezvous import stop_client
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.cluster.rendezvous.members import RunSpec
from roundelay.cluster.rendezvous.messages import packed
from roundelay.cluster.rendezvous.server import RendezvousServer, _LearnerConnection, open_listener
from roundelay.cluster.rendezvous.state import RendezvousState
from roundelay.errors import DroppedError, HandshakeError, RendezvousLostError
from roundelay.transport.heartbeats import LOST_AFTER_S
from roundelay.transport.security import Security

SECURITY = Security(secrets.token_bytes(32))
RUN = RunSpec(expected=2, stop_groups=(0, 1))
HERE = ("127.0.0.1", 9)


@contextlib.contextmanager
def serving(port=0):
    server = RendezvousServer(open_listener("127.0.0.1", port), SECURITY, RendezvousState(time.monotonic))
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def registered(server, *, run=RUN):
    """Two learners that have begun together."""
    with RendezvousClient(server.address, SECURITY) as first, RendezvousClient(server.address, SECURITY) as second:
        with ThreadPoolExecutor(2) as pool:
            views = [pool.submit(each.register, run, HERE, number) for number, each in enumerate((first, second))]
            assert [view.result(10).membership.living for view in views] == [(0, 1), (0, 1)]
        yield first, second


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_draws_of_two_learners_are_those_of_one_cursor():
    with serving() as server, registered(server) as (first, second):
        first.budget.declare(5, [1])
        second.budget.declare(5, [1])
        drawn = [
            first.budget.draw(0, 0, 0),
            second.budget.draw(1, 0, 0),
            second.budget.draw(1, 1, 1),
            first.budget.draw(0, 1, 1),
        ]
        assert drawn == [0, 2, 3, 4]
        assert first.budget.draw(0, 2, 2) is None


def test_a_barrier_gives_all_learners_the_values_of_all():
    with serving() as server, registered(server) as clients, ThreadPoolExecutor(2) as pool:
        views = [pool.submit(each.barrier, 0, f"of {each.id}") for each in clients]
        assert [view.result(10).values for view in views] == [{0: "of 0", 1: "of 1"}] * 2


def test_a_learner_that_joins_later_counts_the_same_seconds_of_the_run():
    with serving() as server, registered(server) as (first, _), RendezvousClient(server.address, SECURITY) as third:
        time.sleep(0.3)
        third.register(RUN, HERE, None, joins=True)
        time.sleep(0.3)  # as while it takes the weights of others
        assert third.elapsed_s > 0.6
        assert third.elapsed_s == pytest.approx(first.elapsed_s, abs=0.2)


def test_the_loss_of_a_learner_is_announced_to_the_other_with_the_reason():
    with serving() as server, registered(server) as (first, second):
        heard = []
        first.on_view = lambda view, reason: heard.append((view.membership.living, reason))
        second.close("DivergedError: too large")
        wait_until(lambda: heard)
        assert heard == [((0,), "learner 1 died: DivergedError: too large")]


def test_an_unauthenticated_connection_is_refused_and_counted_and_changes_nothing():
    with serving() as server, registered(server) as (first, second):
        with pytest.raises((HandshakeError, ConnectionError)):
            RendezvousClient(server.address, Security(bytes(32)))
        with socket.create_connection(server.address) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        wait_until(lambda: server.refused.counts.total() >= 2)
        first.budget.declare(1, [])
        second.budget.declare(1, [])
        assert first.budget.draw(0, 0, 0) == 0


@pytest.mark.parametrize(
    "nonsense", [{"kind": "draw"}, {"kind": "register", "request": 1}, {"kind": "barrier", "request": 2}]
)
def test_a_member_that_sends_nonsense_loses_its_connection_and_nothing_else(nonsense):
    with serving() as server, registered(server) as (first, second):
        second._connection.send(nonsense)
        wait_until(lambda: server.refused.counts.total() == 1)
        first.budget.declare(1, [])
        second.budget.declare(1, [])
        assert first.budget.draw(0, 0, 0) == 0


def test_while_the_rendezvous_is_away_learners_draw_their_own_numbers_and_reconnect(caplog):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving())
        port = server.address[1]
        first, second = stack.enter_context(registered(server))
        for each in (first, second):
            each.budget.declare(9, [])
        assert [first.budget.draw(0, 0, 0), second.budget.draw(1, 0, 0)] == [0, 1]
        server.close()
        wait_until(lambda: not first._connection.connected and not second._connection.connected)
        assert [first.budget.draw(0, 1, 1), second.budget.draw(1, 1, 1), first.budget.draw(0, 2, 2)] == [2, 3, 4]
        with serving(port) as again:
            wait_until(
                lambda: again.living() == [0, 1] and first._connection.connected and second._connection.connected
            )
            wait_until(lambda: caplog.text.count("found the rendezvous again") == 2 or first.view.membership.generation)
            drawn = sorted([first.budget.draw(0, 3, 3), second.budget.draw(1, 2, 2)])
            assert drawn == [5, 6]
            for each in (first, second):
                each.close()


def test_a_request_that_needs_the_rendezvous_waits_for_it_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(stop_client, "STOPPING_S", 0.2)
    with serving() as server, registered(server) as (first, second):
        server.close()
        wait_until(lambda: not first._connection.connected)
        assert first.stop.boundary(default=7) == 7
        assert first.stop.last_step(3) == 3
        with pytest.raises(RendezvousLostError, match="away for"):
            first._ask("barrier", 0.2, repeat=True, value=None, lost=[], generation=0, address=HERE)
        second.close()


def test_a_learner_that_was_dropped_learns_so_and_may_join_again():
    with serving() as server, registered(server) as (first, second):
        server.died(1, "taken for dead")
        wait_until(lambda: second._connection.dropped is not None)
        with pytest.raises(DroppedError, match="taken for dead"):
            second.check()
        with pytest.raises(DroppedError):
            second.budget.declare(1, [])
        second.rejoin(HERE, weights=True)
        assert second.joining
        second.ready()
        wait_until(lambda: first.view.membership.living == (0, 1))


def test_a_silent_unauthenticated_connection_does_not_block_learners():
    with serving() as server, contextlib.closing(socket.create_connection(server.address)):
        done = threading.Event()
        with registered(server):
            done.set()
        assert done.is_set()


def test_a_message_larger_than_a_packet_arrives_whole():
    with serving() as server, registered(server) as (first, second):
        first.budget.declare(10, [])
        second.budget.declare(10, [])
        large = list(range(100_000))
        assert len(packed({"kind": "barrier", "value": large})) > 2**19
        with ThreadPoolExecutor(2) as pool:
            views = [pool.submit(each.barrier, 0, large) for each in (first, second)]
            assert views[0].result(10).values[1] == large


def test_a_request_made_while_the_rendezvous_is_away_is_answered_once_it_is_back():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving())
        port = server.address[1]
        first, second = stack.enter_context(registered(server))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        server.close()
        wait_until(lambda: not first._connection.connected and not second._connection.connected)
        views = [pool.submit(each.barrier, 0, each.id) for each in (first, second)]
        with serving(port):
            assert [view.result(20).values for view in views] == [{0: 0, 1: 1}] * 2
            for each in (first, second):
                each.close()


def test_a_broken_connection_to_one_learner_does_not_stop_the_server_from_writing_to_others():
    here, there = socket.socketpair()
    connection = _LearnerConnection(here)
    there.close()
    for _ in range(3):
        connection.send({"kind": "heartbeat"})
    with pytest.raises(ConnectionError):
        connection.receive()
    connection.close()


def test_a_client_that_does_not_register_keeps_its_connection_and_can_report_a_death():
    with serving() as server, RendezvousClient(server.address, SECURITY) as supervisor:
        time.sleep(LOST_AFTER_S + 1.5)
        assert supervisor.connected
        supervisor.report_death("host-7-0", "exit code 1")
        with RendezvousClient(server.address, SECURITY) as learner:
            assert learner.register(RUN, HERE, 0).membership.living == (0,)
