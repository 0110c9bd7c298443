import gc
import logging
import os
import random
import socket
import threading
import time
import traceback
from concurrent.futures import wait

import pytest
import torch
from exchanges import answering, calling
from loopback import PATIENCE_S, loopback, outcomes, raw_connection, together

from roundelay.errors import CheckpointError, PeerLostError, StrategyError
from roundelay.transport import tcp
from roundelay.transport.base import LEFT, Swap
from roundelay.transport.framing import Connection, Header, Kind

ALL = (0, 1, 2)
both = pytest.mark.parametrize("share_memory", [True, False], ids=["shared", "sockets"])


def crash(transport):
    """End a learner as SIGKILL would: its connections close without a goodbye."""
    transport._detector._say = lambda message: None
    transport.close()


def numbers(transport, count, value):
    return transport.allocate(8 * count).fill_(0).view(torch.float64).fill_(value).view(torch.uint8)


# Calls -----------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("nbytes", [8, 3 * 2**20])
def test_all_learners_call_each_other_at_once_and_every_reply_is_right(share_memory, nbytes):
    size, calls = 4, 40
    with loopback(size, share_memory=share_memory) as transports:
        for transport in transports:
            transport.serve(
                answering(lambda peer, request, reply, rank=transport.rank: reply.copy_(request + (10 * rank + peer)))
            )

        def work(rank):
            transport, rng = transports[rank], random.Random(rank)
            buffer = transport.allocate(nbytes)
            for _ in range(calls):
                peer = rng.choice([other for other in range(size) if other != rank])
                buffer.fill_(100)
                transport.call(peer, calling(buffer)).result(PATIENCE_S)
                assert (buffer == 100 + 10 * peer + rank).all()

        together(size, work)
    if not share_memory:  # once all is closed: a reply is counted after it was sent
        assert sum(t.traffic.bytes_sent for t in transports) >= 2 * size * calls * nbytes
    assert sum(sum(t.traffic.messages.values()) for t in transports) == 2 * size * calls


@pytest.mark.parametrize("share_memory", [True, False])
def test_a_request_in_other_memory_stays_as_it_is_and_the_reply_comes_into_the_buffer(share_memory):
    with loopback(2, share_memory=share_memory) as (a, b):
        b.serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
        source, buffer = a.allocate(4096).fill_(5), a.allocate(4096)
        for sent in (5, 7):
            a.call(1, calling(buffer, source.fill_(sent))).result(PATIENCE_S)
            assert (buffer == sent + 1).all()
            assert (source == sent).all()
        elsewhere = torch.full((4096,), 9, dtype=torch.uint8)  # not in shared memory
        a.call(1, calling(buffer, elsewhere)).result(PATIENCE_S)
        assert (buffer == 10).all()


def test_learners_with_and_without_shared_memory_talk_to_each_other():
    with loopback(3, share_memory=[True, False, True]) as transports:
        for transport in transports:
            transport.serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
        for rank, peer in [(0, 1), (1, 0), (0, 2)]:
            buffer = transports[rank].allocate(64).fill_(5)
            transports[rank].call(peer, calling(buffer)).result(PATIENCE_S)
            assert (buffer == 6).all()


@both
def test_a_call_waits_until_it_is_served(share_memory):
    with loopback(2, share_memory=share_memory) as (a, b):
        buffer = a.allocate(8).fill_(1)
        future = a.call(1, calling(buffer))
        served = threading.Event()
        assert not wait([future], timeout=0.05).done
        b.serve(answering(lambda peer, request, reply: (reply.copy_(request + 1), served.set())))
        future.result(PATIENCE_S)
        assert served.is_set()
        assert (buffer == 2).all()


@both
def test_after_serve_none_calls_are_refused_and_none_is_being_served(share_memory):
    with loopback(2, share_memory=share_memory) as (a, b):
        b.serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
        buffer = a.allocate(8).fill_(1)
        a.call(1, calling(buffer)).result(PATIENCE_S)
        b.serve(None)
        for _ in range(2):
            error = a.call(1, calling(buffer)).exception(PATIENCE_S)
            assert isinstance(error, PeerLostError)
            assert error.reason == "it serves no more calls"
        assert (buffer == 2).all()


def test_serve_none_waits_for_the_call_being_served():
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(peer, request, reply):
        inside.set()
        assert go_on.wait(PATIENCE_S)
        ended.set()

    with loopback(2) as (a, b):
        b.serve(answering(slow))
        future = a.call(1, calling(a.allocate(8)))
        assert inside.wait(PATIENCE_S)
        stopping = threading.Thread(target=b.serve, args=(None,))
        stopping.start()
        assert not ended.is_set()
        go_on.set()
        stopping.join(PATIENCE_S)
        assert ended.is_set()
        future.result(PATIENCE_S)


@pytest.mark.parametrize("kind", [ValueError, ConnectionResetError, PeerLostError])
def test_what_a_handler_raises_reaches_the_training_thread_with_its_traceback(kind):
    def unlucky_handler(peer, request, reply):
        raise kind(1, "in the handler")

    with loopback(3) as transports:
        a, b, _ = transports
        b.serve(answering(unlucky_handler))
        pending = b.all_reduce(torch.zeros(1), ALL)  # the training thread waits in a sum that never ends
        assert isinstance(a.call(1, calling(a.allocate(8))).exception(PATIENCE_S), PeerLostError)
        error = pending.exception(PATIENCE_S)
        assert type(error) is kind
        assert "unlucky_handler" in "".join(traceback.format_tb(error.__traceback__))
        with pytest.raises(kind, match="in the handler"):
            b.check()
        assert b.swap(Swap(0, b.allocate(8), {0: b.allocate(8)})).exception(PATIENCE_S) is error
        assert b.finish(b.allocate(8), ALL).exception(PATIENCE_S) is error


def test_a_listener_that_raises_does_not_stop_the_heartbeats():
    heard = threading.Event()

    def broken(peer, reason):
        heard.set()
        raise ZeroDivisionError("in a listener")

    with loopback(3) as (a, b, c):
        a.on_lost(broken)
        b.close()
        assert heard.wait(PATIENCE_S)
        c.close()
        assert isinstance(a.all_reduce(torch.zeros(1), ALL).exception(PATIENCE_S), (ZeroDivisionError, PeerLostError))
        assert a._detector._thread.is_alive()
        with pytest.raises(ZeroDivisionError, match="in a listener"):
            a.check()


# Swaps -----------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("count", [1, 400_000])
def test_swaps_bring_every_learner_the_weights_of_the_round_at_any_pace(share_memory, count):
    size, rounds = 3, 12
    with loopback(size, share_memory=share_memory) as transports:

        def work(rank):
            transport, rng = transports[rank], random.Random(rank)
            outgoing = numbers(transport, count, 0)
            incoming = {peer: numbers(transport, count, 0) for peer in range(size) if peer != rank}
            for round in range(rounds):
                outgoing.view(torch.float64).fill_(100 * round + rank)
                if rng.random() < 0.3:
                    threading.Event().wait(0.005)
                transport.swap(Swap(round, outgoing, incoming)).result(PATIENCE_S)
                for peer, buffer in incoming.items():
                    assert (buffer.view(torch.float64) == 100 * round + peer).all()

        together(size, work)


@both
def test_a_peer_one_round_behind_gets_both_rounds(share_memory):
    with loopback(2, share_memory=share_memory) as (fast, slow):
        ahead = [fast.swap(Swap(round, numbers(fast, 4, round), {1: numbers(fast, 4, -1)})) for round in (0, 1)]
        for round in (0, 1):
            got = numbers(slow, 4, -1)
            slow.swap(Swap(round, numbers(slow, 4, 10 + round), {0: got})).result(PATIENCE_S)
            assert (got.view(torch.float64) == round).all()
            ahead[round].result(PATIENCE_S)


@both
def test_a_learner_that_has_finished_answers_with_its_final_weights_until_all_have(share_memory):
    with loopback(3, share_memory=share_memory) as transports:
        finals = [numbers(t, 4, 1000 + t.rank) for t in transports]
        ends = [transports[rank].finish(finals[rank], ALL) for rank in (0, 1)]
        slow = transports[2]
        for round in range(5):
            got = {peer: numbers(slow, 4, 0) for peer in (0, 1)}
            slow.swap(Swap(round, numbers(slow, 4, 7), got)).result(PATIENCE_S)
            assert [float(got[peer].view(torch.float64)[0]) for peer in (0, 1)] == [1000, 1001]
            assert not any(end.done() for end in ends)
        ends.append(slow.finish(finals[2], ALL))
        for end in ends:
            end.result(PATIENCE_S)


def test_learners_with_different_mixings_are_told_instead_of_waiting():
    with loopback(3) as (a, _, c):
        waiting = a.swap(Swap(0, a.allocate(8), {1: a.allocate(8)}))
        c.swap(Swap(0, c.allocate(8), {0: c.allocate(8)}))
        assert isinstance(waiting.exception(PATIENCE_S), StrategyError)
        with pytest.raises(StrategyError, match="learner 2 swaps with us"):
            a.check()


# Learners that die, freeze or leave -----------------------------------------------------------------------------------------


@both
def test_futures_that_wait_for_a_learner_that_dies_name_it(share_memory):
    with loopback(3, share_memory=share_memory) as (a, b, c):
        lost = []
        told = threading.Event()
        a.on_lost(lambda peer, reason: (lost.append((peer, reason)), told.set()))
        c.serve(answering(lambda peer, request, reply: None))
        futures = [
            a.call(1, calling(a.allocate(8))),
            a.swap(Swap(0, a.allocate(8), {1: a.allocate(8)})),
            a.all_reduce(torch.zeros(1), ALL),
        ]
        crash(b)
        for future in futures:
            error = future.exception(PATIENCE_S)
            assert isinstance(error, PeerLostError)
            assert error.peer == 1
        assert told.wait(PATIENCE_S)
        assert [peer for peer, _ in lost] == [1], "told once"
        a.call(2, calling(a.allocate(8))).result(PATIENCE_S)
        assert isinstance(a.call(1, calling(a.allocate(8))).exception(PATIENCE_S), PeerLostError)


def test_a_learner_that_gives_up_tells_its_peers_why():
    with loopback(2) as (a, b):
        future = a.all_reduce(torch.zeros(1), (0, 1))
        b.close("ValueError: no data")
        assert str(future.exception(PATIENCE_S)) == "lost learner 1: it gave up (ValueError: no data)"


def test_a_learner_that_leaves_in_order_fails_no_sum_under_way():
    """The last sum of a run ends at one learner before it ends at another."""
    with loopback(2) as (a, b):
        reasons, told = [], threading.Event()
        a.on_lost(lambda peer, reason: (reasons.append(reason), told.set()))
        pending = a.all_reduce(torch.zeros(1), (0, 1))
        b.close()
        assert told.wait(PATIENCE_S)
        assert reasons == [LEFT]
        assert not pending.done()


def test_a_frozen_peer_does_not_block_others_while_it_is_connected_to(monkeypatch):
    with loopback(3) as (a, b, c), socket.create_server(("127.0.0.1", 0)) as frozen:
        b.serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
        a._connections._addresses[2] = frozen.getsockname()[:2]  # accepted by its kernel, never answered
        stuck = a.call(2, calling(a.allocate(8)))
        buffer = a.allocate(8).fill_(1)
        a.call(1, calling(buffer)).result(PATIENCE_S)
        assert a._connections._lock.acquire(timeout=1.0), "no lock is held while waiting for the network"
        a._connections._lock.release()
        assert not stuck.done()
        crash(c)
        with frozen.accept()[0]:
            pass
        error = stuck.exception(PATIENCE_S)
        assert isinstance(error, PeerLostError)
        assert error.peer == 2


def test_a_request_to_where_a_peer_was_does_not_lose_the_peer_that_has_come_back():
    with loopback(2) as (a, b):
        waiting = a.call(1, calling(a.allocate(8)))  # b does not serve calls yet
        while not b._connections._incoming:
            time.sleep(0.001)
        a.admit(1, b.address)
        error = waiting.exception(PATIENCE_S)
        assert isinstance(error, PeerLostError)
        assert error.reason == "it has come back at another address"
        assert a.lost == {}
        b.serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
        buffer = a.allocate(8).fill_(1)
        a.call(1, calling(buffer)).result(PATIENCE_S)
        assert (buffer == 2).all()


def test_a_connection_that_opens_while_its_peer_comes_back_is_closed():
    with loopback(2) as (a, b), socket.create_server(("127.0.0.1", 0)) as frozen:
        b.serve(answering(lambda peer, request, reply: None))
        a._connections._addresses[1] = frozen.getsockname()[:2]
        waiting = a.call(1, calling(a.allocate(8)))
        with frozen.accept()[0]:
            a.admit(1, b.address)
        error = waiting.exception(PATIENCE_S)
        assert isinstance(error, PeerLostError)
        assert a.lost == {}
        a.call(1, calling(a.allocate(8))).result(PATIENCE_S)


def test_a_slower_learner_does_not_wait_for_final_weights_that_cannot_be_sent():
    with loopback(2) as (a, b), socket.create_server(("127.0.0.1", 0)) as closed:
        a._connections._addresses[1] = closed.getsockname()[:2]
        closed.close()
        a.finish(a.allocate(8), (0, 1))
        error = b.swap(Swap(0, b.allocate(8), {0: b.allocate(8)})).exception(PATIENCE_S)
        assert isinstance(error, PeerLostError)
        assert error.peer == 0
        assert "it gave up (its final weights could not be sent" in error.reason


def test_a_peer_that_waits_in_vain_is_told_so_and_loses_us():
    with loopback(2) as (a, b):
        waiting = b._liveness.depending_on((0, 1))  # as a collective that needs learner 0
        a.give_up(1, "the sum has failed here")
        error = waiting.exception(PATIENCE_S)
        assert isinstance(error, PeerLostError)
        assert (error.peer, error.reason) == (0, "it gave up (the sum has failed here)")


def test_a_learner_that_has_finished_does_not_wait_for_a_peer_that_it_loses():
    with loopback(2) as (a, _):
        finished = a.finish(a.allocate(8), (0, 1))
        assert not finished.done()
        a.lose(1, "its connection broke")
        finished.result(PATIENCE_S)


def test_a_learner_that_closes_before_it_offers_its_state_is_lost_to_those_that_wait_for_it():
    with loopback(2) as (a, b):
        fetched = a.fetch(1)
        while not b._connections._incoming:
            time.sleep(0.001)
        b.close()
        assert isinstance(fetched.exception(PATIENCE_S), PeerLostError)


def test_an_error_of_the_offered_state_reaches_the_training_thread():
    def broken():
        raise CheckpointError("cannot save this")  # an OSError, as a broken connection would raise

    with loopback(2) as (a, b):
        b.offer(broken)
        assert isinstance(a.fetch(1).exception(PATIENCE_S), PeerLostError)
        with pytest.raises(CheckpointError, match="cannot save this"):
            b.check()


def test_a_reply_that_cannot_be_sent_is_undone():
    inside, go_on, undone = threading.Event(), threading.Event(), []

    def handler(peer, request, reply):
        inside.set()
        assert go_on.wait(PATIENCE_S)
        reply.fill_(9)

    with loopback(2, share_memory=False) as (a, _):
        a.serve(answering(handler, undone=lambda peer, request, reply: undone.append((peer, reply.tolist()))))
        connection = raw_connection(a)
        caller = connection.socket
        connection.send(Header(Kind.CALL, 4))
        connection.send(Header(Kind.PIECE, 4), torch.tensor(list(b"abcd"), dtype=torch.uint8))
        assert inside.wait(PATIENCE_S)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        caller.close()  # with a reset
        go_on.set()
        a.close()
        assert undone == [(1, [9] * 4)]


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 64, Header(Kind.CALL, 8).pack() + bytes(16), b"abc"], ids=["kind", "tag", "short"]
)
def test_garbage_on_a_connection_ends_that_connection_and_nothing_else(garbage, caplog):
    with loopback(2) as (a, b), caplog.at_level(logging.WARNING, "roundelay"):
        a.serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
        with raw_connection(a).socket as theirs:
            theirs.sendall(garbage)
            theirs.shutdown(socket.SHUT_WR)
            assert theirs.recv(100) == b""
        a.check()
        buffer = b.allocate(8).fill_(1)
        b.call(0, calling(buffer)).result(PATIENCE_S)
        assert (buffer == 2).all()
    assert len(caplog.records) == (len(garbage) > 3)


# The end -----------------------------------------------------------------------------------------------------------------


@both
def test_close_leaves_no_thread_and_no_file_behind_and_may_be_called_again(share_memory):
    gc.collect()  # shared memory goes with the last tensor on it
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with loopback(3, share_memory=share_memory) as transports:
        for transport in transports:
            transport.serve(answering(lambda peer, request, reply: None))

        def work(rank):
            transport = transports[rank]
            peers = [peer for peer in ALL if peer != rank]
            for peer in peers:
                transport.call(peer, calling(transport.allocate(8))).result(PATIENCE_S)
            incoming = {peer: transport.allocate(8) for peer in peers}
            transport.swap(Swap(0, transport.allocate(8), incoming)).result(PATIENCE_S)
            transport.finish(transport.allocate(8), ALL).result(PATIENCE_S)
            transport.close()
            transport.close()

        together(3, work)
        assert set(threading.enumerate()) == threads
    del transport, work
    transports.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files


def test_close_does_not_wait_for_peers_that_wait_for_us():
    """Threads blocked in every kind of request wake up: an unserved call, an early swap, a handshake without an answer."""
    threads = set(threading.enumerate())
    with loopback(2) as (a, b):
        unauthenticated = socket.create_connection(a.address)
        unserved = b.call(0, calling(b.allocate(8)))
        early = b.swap(Swap(5, b.allocate(8), {0: b.allocate(8)}))
        mine = a.call(1, calling(a.allocate(8)))
        results = outcomes(2, lambda rank: (a, b)[rank].close())
        assert results == [None, None]
        assert isinstance(unserved.exception(PATIENCE_S), PeerLostError)
        assert isinstance(mine.exception(PATIENCE_S), PeerLostError)
        early.cancel()
        unauthenticated.close()
    assert set(threading.enumerate()) == threads


def test_requests_after_close_fail_instead_of_waiting():
    with loopback(2) as (a, _):
        a.close()
        with pytest.raises(RuntimeError, match="after shutdown"):
            a.call(1, calling(torch.zeros(8, dtype=torch.uint8)))


def test_a_caller_that_freezes_in_the_middle_of_a_request_does_not_hang_close(monkeypatch):
    with loopback(2, share_memory=False) as (a, b):
        received = threading.Event()
        receive = Connection.receive_into

        def blocked(connection, buffer, header):
            received.set()
            return receive(connection, buffer, header)

        monkeypatch.setattr(Connection, "receive_into", blocked)
        a.serve(answering(lambda peer, request, reply: None))
        with b._connections.to(0) as connection:
            connection.send(Header(Kind.CALL, 1000))
            connection.send(Header(Kind.PIECE, 1000))
            connection.socket.sendall(b"only the beginning")
            assert received.wait(PATIENCE_S)
            closing = threading.Thread(target=a.close)
            closing.start()
            a._detected(tcp.Event.LOST, 1, "no heartbeat")
            closing.join(PATIENCE_S)
            assert not closing.is_alive()


def test_listeners_hear_of_a_lost_peer_also_if_the_training_thread_closes_because_of_it():
    with loopback(2) as (a, _):
        told = []
        a.on_lost(lambda peer, reason: told.append(peer))
        waiting = a.swap(Swap(0, a.allocate(64), {1: a.allocate(64)}))
        waiting.add_done_callback(lambda _: setattr(a, "_closed", True))  # as fast as a training thread can be
        a.lose(1, "its process ended")
        a._closed = False  # so that it is closed at the end
        assert told == [1]
