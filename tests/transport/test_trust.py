"""Unauthenticated connections, altered messages, frozen callers: exchanges go on; refusals are counted and logged."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from exchanges import PIECE_BYTES, answering, calling
from loopback import PATIENCE_S, loopback, raw_connection
from relay import Flip, Relay, behind

from roundelay import threads
from roundelay.errors import PeerLostError, RefusedError, StrategyError
from roundelay.transport import acceptor, call_server, handshake, requests
from roundelay.transport.base import Swap
from roundelay.transport.framing import HEADER_BYTES, Header, Kind
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.security import Security

HEADERS = 2 * HEADER_BYTES  # of the call and of its first piece
both = pytest.mark.parametrize("share_memory", [True, False], ids=["shared", "sockets"])


def add_one(peer, request, reply):
    reply.copy_(request + 1)


@contextlib.contextmanager
def exchanging(size=2, **options):
    """Learners of which 1 calls 0 all the time. At the end the calls must still succeed, and nothing may have failed."""
    with loopback(size, **options) as transports:
        answerer, caller = transports[:2]
        answerer.serve(answering(add_one))
        stop, calls = threading.Event(), []

        def work():
            buffer = caller.allocate(4096)
            while not stop.is_set():
                caller.call(0, calling(buffer.fill_(1))).result(PATIENCE_S)
                assert (buffer == 2).all()
                calls.append(time.monotonic())

        failures = []

        def guarded():
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        try:
            until(lambda: calls or failures)  # the connection stands before a test disturbs anything
            yield transports
            before = len(calls)
            while not failures and len(calls) < before + 20:
                time.sleep(0.001)
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        assert not failures
        answerer.check()
        caller.check()
        assert not answerer.lost
        assert not caller.lost


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.002)


def refused(transport, reason):
    return transport.refused.counts[reason]


# Unauthenticated connections ---------------------------------------------------------------------------------------


def wrong_secret(address):
    with pytest.raises(OSError):  # noqa: PT011
        handshake.connect(address, Hello(1, Purpose.REQUESTS, os.getpid(), bytes(16)), 0, Security(b"wrong" * 8))


def send(address, data):
    """Send bytes, then read until the learner closes the connection."""
    with socket.create_connection(address, timeout=PATIENCE_S) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        while connection.recv(1000):
            pass


def garbage(address):
    send(address, os.urandom(2**16))


def http_request(address):
    send(address, b"GET / HTTP/1.1\r\nHost: learner\r\n\r\n" * 5)


def header_without_handshake(address):
    send(address, Header(Kind.CALL, 2**40).pack() * 3)


def nothing(address):
    socket.create_connection(address, timeout=PATIENCE_S).close()


@pytest.mark.parametrize("attempt", [wrong_secret, garbage, http_request, header_without_handshake, nothing])
def test_an_unauthenticated_connection_changes_nothing_and_is_counted_and_logged(attempt, caplog):
    with caplog.at_level(logging.WARNING, "roundelay"), exchanging() as (learner, _):
        for _ in range(3):
            attempt(learner.address)
        until(lambda: refused(learner, "handshake") == 3)
    assert len(caplog.records) == 1, "a flood must not fill the log"
    assert "learner 0 refused a connection" in caplog.text


ATTACKER = """
import os, socket, sys
for attempt in range(20):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) as connection:
        challenge = connection.recv(100)
        try:
            connection.sendall(challenge[8:] * 4 + os.urandom(60))
            assert connection.recv(100) == b"", "accepted"
        except ConnectionError:
            pass
"""


def test_a_process_without_the_secret_is_not_accepted():
    with exchanging() as (learner, _):
        command = [sys.executable, "-c", ATTACKER, str(learner.address[1])]
        subprocess.run(command, check=True, timeout=PATIENCE_S)
        until(lambda: refused(learner, "handshake") == 20)


def test_a_recorded_connection_cannot_be_played_again():
    with exchanging(3) as (learner, _, third):
        relay = Relay(learner.address)
        third._connections._addresses[0] = relay.address
        third.call(0, calling(third.allocate(64).fill_(1))).result(PATIENCE_S)
        send(learner.address, relay.recorded)
        until(lambda: refused(learner, "handshake") == 1)


def test_a_connection_that_sends_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.2)
    with exchanging() as (learner, _):
        connections = [socket.create_connection(learner.address, timeout=PATIENCE_S) for _ in range(5)]
        until(lambda: refused(learner, "handshake") == 5)
        for connection in connections:
            connection.close()


def test_a_flood_of_connections_does_not_block_learners(caplog):
    flood = 5 * acceptor.MOST_UNAUTHENTICATED
    with caplog.at_level(logging.WARNING, "roundelay"), exchanging(3) as (learner, _, third):
        threads = threading.active_count()
        connections = [socket.create_connection(learner.address, timeout=PATIENCE_S) for _ in range(flood)]
        until(lambda: refused(learner, "handshake") >= flood - acceptor.MOST_UNAUTHENTICATED - 1)
        assert threading.active_count() <= threads + acceptor.MOST_UNAUTHENTICATED + 5
        buffer = third.allocate(64).fill_(1)
        third.call(0, calling(buffer)).result(PATIENCE_S)  # over a new connection
        assert (buffer == 2).all()
        for connection in connections:
            connection.close()
        until(lambda: refused(learner, "handshake") >= flood)
    assert len(caplog.records) < 10


def test_a_learner_that_runs_out_of_files_accepts_connections_later():
    with exchanging(3) as (learner, _, third):
        real, left = learner._acceptor._listener, [3]

        class Exhausted:
            def accept(self):
                if left[0]:
                    left[0] -= 1
                    raise OSError(24, "Too many open files")
                return real.accept()

            def __getattr__(self, name):
                return getattr(real, name)

        learner._acceptor._listener = Exhausted()
        socket.create_connection(learner.address).close()  # so that the pending accept returns
        until(lambda: not left[0])
        third.call(0, calling(third.allocate(64))).result(PATIENCE_S)
        learner._acceptor._listener = real


def test_a_learner_that_runs_out_of_threads_accepts_connections_later(monkeypatch):
    start, failures = threads.start, []

    def out_of_threads(name, target):
        if not failures:
            failures.append(name)
            raise RuntimeError("can't start new thread")
        return start(name, target)

    with exchanging(3) as (learner, _, third):
        monkeypatch.setattr(threads, "start", out_of_threads)
        socket.create_connection(learner.address).close()
        until(lambda: refused(learner, "handshake") == 1)
        third.call(0, calling(third.allocate(64))).result(PATIENCE_S)


def test_a_learner_of_another_run_is_refused():
    with exchanging() as (learner, _):
        other = Security(learner._connections._security.secret, run="another")
        with pytest.raises(OSError):  # noqa: PT011
            handshake.connect(learner.address, Hello(1, Purpose.REQUESTS, os.getpid(), bytes(16)), 0, other)
        until(lambda: refused(learner, "handshake") == 1)


# Messages --------------------------------------------------------------------------------------------------------------


@both
def test_a_handler_may_refuse_a_call_and_no_peer_is_lost(share_memory):
    def choosy(peer, request, reply):
        if request[0] == 7:
            raise RefusedError(peer, "sevens")
        reply.copy_(request + 1)

    with loopback(2, share_memory=share_memory) as (a, b):
        b.serve(answering(choosy))
        buffer = a.allocate(4096)
        for value in (7, 1, 7, 1):
            future = a.call(1, calling(buffer.fill_(value)))
            if value == 7:
                error = future.exception(PATIENCE_S)
                assert isinstance(error, RefusedError)
                assert (error.peer, error.reason) == (1, "sevens")
                assert (buffer == 7).all()
            else:
                future.result(PATIENCE_S)
                assert (buffer == 2).all()
        b.check()
        assert refused(b, "sevens") == 2
        assert not a.lost


def test_a_call_that_was_altered_on_the_way_is_refused_and_the_next_one_is_taken(caplog):
    served = []
    with loopback(2, share_memory=False) as (a, b), caplog.at_level(logging.WARNING, "roundelay"):
        behind(a, 1, Flip(HEADERS + 500, outward=True))
        b.serve(answering(lambda peer, request, reply: served.append(request.clone())))
        buffer = a.allocate(4096).fill_(1)
        error = a.call(1, calling(buffer)).exception(PATIENCE_S)
        assert isinstance(error, RefusedError)
        assert error.reason == "checksum"
        assert served == [], "nothing of it was applied"
        a.call(1, calling(buffer)).result(PATIENCE_S)
        assert len(served) == 1
        assert (served[0] == 1).all()
        assert b.refused.counts == {"checksum": 1}
        assert not a.lost
    assert "learner 1 refused a call of learner 0: checksum" in caplog.text


def test_a_reply_that_was_altered_on_the_way_fails_the_call_and_no_more():
    with loopback(2, share_memory=False) as (a, b):
        behind(a, 1, Flip(HEADER_BYTES + 500, outward=False))
        b.serve(answering(add_one))
        error = a.call(1, calling(a.allocate(4096).fill_(1))).exception(PATIENCE_S)
        assert isinstance(error, RefusedError)
        assert a.refused.counts == {"checksum": 1}
        buffer = a.allocate(4096).fill_(1)
        a.call(1, calling(buffer)).result(PATIENCE_S)
        assert (buffer == 2).all()


def test_a_swap_that_was_altered_on_the_way_is_sent_again():
    with loopback(2, share_memory=False) as (a, b):
        behind(a, 1, Flip(HEADERS + 500, outward=True))
        got = {rank: t.allocate(4096).fill_(0) for rank, t in enumerate((a, b))}
        swaps = [
            t.swap(Swap(0, t.allocate(4096).fill_(rank + 1), {1 - rank: got[rank]})) for rank, t in enumerate((a, b))
        ]
        for swap in swaps:
            swap.result(PATIENCE_S)
        assert (got[0] == 2).all()
        assert (got[1] == 1).all()
        assert b.refused.counts == {"checksum": 1}


def test_a_swap_that_is_altered_every_time_fails_in_the_end():
    with loopback(2, share_memory=False) as (a, b):
        behind(a, 1, lambda outward, start, data: data if len(data) < 1000 else data[:-1] + bytes([data[-1] ^ 1]))
        b.swap(Swap(0, b.allocate(4096), {0: b.allocate(4096)}))
        error = a.swap(Swap(0, a.allocate(4096), {1: a.allocate(4096)})).exception(PATIENCE_S)
        assert isinstance(error, RefusedError)
        assert refused(b, "checksum") == requests.SWAP_ATTEMPTS


def test_an_altered_header_ends_its_connection_but_neither_learner():
    with loopback(3, share_memory=False) as (a, b, c):
        behind(a, 1, Flip(HEADER_BYTES + 5, outward=True))
        b.serve(answering(add_one))
        assert isinstance(a.call(1, calling(a.allocate(4096))).exception(PATIENCE_S), PeerLostError)
        assert b.refused.counts == {"header": 1}
        b.check()
        c.call(1, calling(c.allocate(4096))).result(PATIENCE_S)


@pytest.mark.parametrize(
    "header",
    [
        Header(Kind.CALL, 2**50),
        Header(Kind.REPLY, 8),
        Header(Kind.RECEIVED, 0),
        Header(Kind.CALL, 8, shared=99_999),
        Header(Kind.CALL, 2**39, shared=0),
        Header(Kind.CALL, 8, request=99_999, shared=99_999),
    ],
    ids=["oversized", "reply", "received", "no such file", "not shared", "no such request"],
)
def test_a_header_that_makes_no_sense_ends_its_connection_and_nothing_else(header):
    with exchanging() as (learner, _):
        connection = raw_connection(learner)
        connection.send(header)
        with connection.socket:
            assert connection.socket.recv(100) == b""


def test_shared_memory_is_refused_by_a_learner_that_has_none():
    with exchanging(share_memory=False) as (learner, _):
        connection = raw_connection(learner)
        connection.send(Header(Kind.CALL, 8, shared=3))
        with connection.socket:
            assert connection.socket.recv(100) == b""
        until(lambda: refused(learner, "header") == 1)


@both
def test_a_call_with_weights_of_another_layout_is_refused(share_memory):
    with loopback(2, share_memory=share_memory) as (a, b):
        b.serve(answering(add_one))
        a.layout, b.layout = 5, 6
        error = a.call(1, calling(a.allocate(4096))).exception(PATIENCE_S)
        assert isinstance(error, RefusedError)
        assert error.reason == "another model"
        b.layout = 5
        a.call(1, calling(a.allocate(4096))).result(PATIENCE_S)


@both
@pytest.mark.parametrize("difference", ["size", "layout"])
def test_a_swap_with_weights_of_another_model_is_an_error_that_says_so(share_memory, difference):
    with loopback(2, share_memory=share_memory) as (a, b):
        a.layout, b.layout = (5, 6) if difference == "layout" else (0, 0)
        nbytes = 4096 if difference == "layout" else 8192
        a.swap(Swap(0, a.allocate(nbytes), {1: a.allocate(nbytes)}))
        waiting = b.swap(Swap(0, b.allocate(4096), {0: b.allocate(4096)}))
        with pytest.raises(StrategyError, match="build the same model everywhere"):
            waiting.result(PATIENCE_S)


# Frozen learners -------------------------------------------------------------------------------------------------------


def test_a_caller_that_freezes_in_the_middle_of_its_request_blocks_no_other(monkeypatch):
    monkeypatch.setattr(call_server, "STALL_S", 0.1)
    with exchanging(share_memory=False) as (learner, _):
        frozen, buffer = raw_connection(learner), learner._calls._request_buffer
        frozen.send(Header(Kind.CALL, 10_000))
        frozen.send(Header(Kind.PIECE, 10_000))
        frozen.socket.sendall(b"and no more")
        until(lambda: learner._calls._request_buffer is not buffer)
        assert buffer.lock.locked()
    frozen.socket.close()


def send_all(connection, request):
    with contextlib.suppress(OSError):
        for piece in request.split(PIECE_BYTES):
            connection.send(Header(Kind.PIECE, piece.nbytes), piece)


def test_a_caller_that_does_not_read_its_reply_blocks_no_other(monkeypatch):
    monkeypatch.setattr(call_server, "STALL_S", 0.1)
    large = torch.zeros(32 * 2**20, dtype=torch.uint8)
    with exchanging(share_memory=False) as (learner, _):
        frozen, buffer = raw_connection(learner), learner._calls._request_buffer
        frozen.send(Header(Kind.CALL, large.nbytes))
        threading.Thread(target=send_all, args=(frozen, large), daemon=True).start()
        until(lambda: learner._calls._request_buffer is not buffer)
        assert buffer.lock.locked()
        frozen.socket.close()


def test_a_peer_that_continues_after_a_failed_call_writes_into_memory_that_no_later_call_uses():
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def frozen(peer, request, reply):
        inside.set()
        assert go_on.wait(PATIENCE_S)
        reply.fill_(99)
        ended.set()

    with loopback(2, share_memory=True) as (a, b):
        b.serve(answering(frozen))
        buffer = a.allocate(4096)
        future = a.call(1, calling(buffer.fill_(1)))
        assert inside.wait(PATIENCE_S)
        a.lose(1, "no heartbeat")
        assert isinstance(future.exception(PATIENCE_S), PeerLostError)
        a.free(buffer)
        following = a.allocate(4096).fill_(5)
        go_on.set()
        assert ended.wait(PATIENCE_S)
        assert (following == 5).all()
        assert a._memory.locate(buffer) == -1
