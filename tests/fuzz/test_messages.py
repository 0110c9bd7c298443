"""Any bytes at all, where a message is expected: our own error and a closed connection, never a crash, never a hang."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading

import pytest
import torch
from ends import socket_pair
from exchanges import answering, calling
from hypothesis import example, given, settings, strategies as st
from loopback import PATIENCE_S, loopback

from roundelay.cluster.rendezvous.messages import MessageBuffer, packed
from roundelay.errors import HandshakeError, PeerLostError, RefusedError
from roundelay.transport import handshake
from roundelay.transport.failure_detector import Event, FailureDetector
from roundelay.transport.framing import Connection, Header, Kind
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.security import Security

MANY = settings(max_examples=300)
FEW = settings(max_examples=40)
SECURITY = Security(b"s" * 32)
KEYS = (b"a" * 32, b"b" * 32)


# Handshakes ------------------------------------------------------------------------------------------------------------


@MANY
@given(st.binary(max_size=400) | st.binary(min_size=16, max_size=200).map(lambda data: handshake.MAGIC + data))
def test_any_answer_to_a_caller_is_an_error_of_the_connection(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1000):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConnectionError):
            handshake.connect(listener.getsockname()[:2], Hello(0, Purpose.REQUESTS, 1, bytes(16)), 1, SECURITY)
        thread.join(PATIENCE_S)


@MANY
@given(st.binary(min_size=45, max_size=45), st.integers(0, 255))
def test_any_call_of_who_knows_the_secret_is_accepted_or_an_error_of_the_connection(said, purpose):
    call = bytearray(said)
    call[8] = purpose
    with socket_pair() as (ours, theirs):
        outcome: queue.Queue[object] = queue.Queue()

        def answer():
            try:
                outcome.put(handshake.accept(ours, 1, bytes(16), SECURITY)[1])
            except Exception as error:
                outcome.put(error)

        thread = threading.Thread(target=answer)
        thread.start()
        challenge = theirs.recv(24)
        theirs.sendall(bytes(call) + handshake._proof(SECURITY, b"caller", challenge + bytes(call)))
        found = outcome.get(timeout=PATIENCE_S)
        thread.join(PATIENCE_S)
    assert isinstance(found, Hello | HandshakeError | OSError)


# Lanes -----------------------------------------------------------------------------------------------------------------

numbers = st.integers(0, 2**64 - 1)
headers = st.builds(
    lambda kind, shared, layout, request, round, nbytes, checksum: struct.pack(
        "!BxxxqIqQQ8s", kind, shared, layout, request, round, nbytes, checksum
    ),
    st.integers(0, 9) | st.integers(0, 255),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(-(2**63), 2**63 - 1),
    numbers,
    st.integers(0, 300) | numbers,
    st.binary(min_size=8, max_size=8),
)


def seal(channel, packed_header):
    channel.socket.sendall(packed_header + channel._outgoing.next_tag(packed_header))


@MANY
@given(headers, st.binary(max_size=300))
def test_any_answer_of_who_has_the_keys_is_one_of_our_errors_or_understood(header, payload):
    with socket_pair() as (a, b):
        ours, theirs = (
            Connection(end, Hello(rank, Purpose.REQUESTS, 1, bytes(16), keys))
            for end, rank, keys in ((a, 1, KEYS), (b, 0, KEYS[::-1]))
        )
        seal(theirs, header)
        b.sendall(payload)
        b.shutdown(socket.SHUT_WR)
        try:
            reply = ours.receive_kind(Kind.REPLY)
            ours.receive_into(torch.empty(100, dtype=torch.uint8), reply)
        except (ConnectionError, HandshakeError, PeerLostError, RefusedError):
            pass


@FEW
@given(st.lists(headers, min_size=1, max_size=4), st.binary(max_size=300))
@example([Header(Kind.CALL, 200, shared=0).pack()], b"")
@example([Header(Kind.CALL, 0).pack()], b"")
def test_a_member_that_lies_about_calls_changes_nothing_for_the_others(lies, payload):
    """Swaps and states aside, which are a matter of the strategy: whoever lies about those is believed."""
    with running() as (learner, other):
        with liar(learner) as lane, contextlib.suppress(OSError):
            for lie in lies:
                if lie[0] not in {Kind.SWAP, Kind.STATE}:
                    seal(lane, lie)
            lane.socket.sendall(payload)
            lane.socket.shutdown(socket.SHUT_WR)
            while lane.socket.recv(4096):
                pass
        buffer = other.allocate(64).fill_(1)
        other.call(0, calling(buffer)).result(PATIENCE_S)
        assert (buffer == 2).all()
        learner.check()


_WORLD: list[object] = []


@contextlib.contextmanager
def running():
    """Two learners, the same for all examples."""
    if not _WORLD:
        stack = contextlib.ExitStack()
        transports = stack.enter_context(loopback(2))
        transports[0].serve(answering(add_one))
        _WORLD.extend((stack, transports))
    yield _WORLD[1]


def add_one(peer, request, reply):
    if peer == 1 and request.nbytes == 64:
        reply.copy_(request + 1)


@pytest.fixture(autouse=True, scope="module")
def _end():
    yield
    if _WORLD:
        _WORLD[0].close()
        _WORLD.clear()


@contextlib.contextmanager
def liar(learner):
    hello = Hello(7, Purpose.REQUESTS, os.getpid(), bytes(16))
    lane = Connection(*handshake.connect(learner.address, hello, learner.rank, learner._connections._security))
    lane.socket.settimeout(PATIENCE_S)
    with lane.socket:
        yield lane


# Heartbeats and the rendezvous -----------------------------------------------------------------------------------------


@FEW
@given(st.binary(min_size=1, max_size=100) | st.binary(max_size=30).map(lambda data: b"..F" + data))
@example(b"G\xff\xff")
@example(b"G\x00\x02\xff\xfe")
@example(b"F" * 100)
def test_any_bytes_on_a_watch_end_that_line_at_most_and_another_goes_on(data):
    news: queue.Queue[tuple[Event, int, str]] = queue.Queue()
    watch = FailureDetector(lambda event, peer, reason: news.put((event, peer, reason)))
    try:
        with socket_pair() as (bad, stranger), socket_pair() as (good, friend):
            watch.add(1, bad)
            watch.add(2, good)
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            told = news.get(timeout=PATIENCE_S)
            while told[0] == Event.FINISHED:
                told = news.get(timeout=PATIENCE_S)
            assert told[1] == 1
            assert told[0] in {Event.LOST, Event.LEFT}
            friend.sendall(b"F")
            assert news.get(timeout=PATIENCE_S)[:2] == (Event.FINISHED, 2)
    finally:
        watch.close()


messages = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3).map(
    lambda more: more | {"kind": "beat"}
)


def read(data, cuts):
    inbox, found = MessageBuffer(), []
    try:
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            found += inbox.feed(data[start:end])
    except HandshakeError:
        found.append("refused")
    return found


@MANY
@given(st.lists(messages, max_size=3), st.binary(max_size=60), st.lists(st.floats(0, 1), max_size=4))
@example([], struct.pack("!I", 2**32 - 1), [])
@example([], struct.pack("!I", 100_000) + b"[" * 100_000, [])
@example([], struct.pack("!I", 12) + b'{"kind":NaN}', [])
def test_the_rendezvous_reads_what_was_sent_and_refuses_the_rest_however_it_is_cut(sent, garbage, places):
    stream = b"".join(map(packed, sent)) + garbage
    cuts = sorted(int(place * len(stream)) for place in places)
    found = read(stream, cuts)
    understood = [each for each in found if each != "refused"]
    assert understood == sent[: len(understood)]
    assert garbage or found == sent
    assert "refused" not in found[:-1], "nothing is read after what was refused"
