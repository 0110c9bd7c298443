import contextlib
import socket
import threading

import pytest
import torch
from ends import socket_pair
from hypothesis import example, given, strategies as st

from roundelay.errors import HandshakeError, PeerLostError, RefusedError
from roundelay.transport import framing
from roundelay.transport.base import NO_CALLS
from roundelay.transport.framing import Connection, Header, Kind
from roundelay.transport.handshake import Hello, Purpose

KEYS = (b"a" * 32, b"b" * 32)
ALICE, BOB = (Hello(rank, Purpose.REQUESTS, 1, bytes(16), keys) for rank, keys in enumerate((KEYS[::-1], KEYS)))


@contextlib.contextmanager
def pair():
    """The two ends of a connection."""
    with socket_pair() as (a, b):
        yield Connection(a, BOB), Connection(b, ALICE)


HEADER_BYTES = 64  # with the tag

headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    nbytes=st.integers(0, framing.MESSAGE_LIMIT_BYTES),
    round=st.integers(0, 2**64 - 1),
    shared=st.integers(-1, 2**63 - 1),
    request=st.integers(-1, 2**63 - 1),
    layout=st.integers(0, 2**32 - 1),
    checksum=st.binary(min_size=8, max_size=8),
)


@given(st.lists(headers, max_size=3))
def test_headers_arrive_as_they_were_sent(sent):
    with pair() as (ours, theirs):
        for header in sent:
            ours.send(header)
            theirs.send(header)
        assert [theirs.receive() for _ in sent] == sent
        assert [ours.receive() for _ in sent] == sent


@given(headers, st.integers(0, HEADER_BYTES - 1), st.integers(0, 7))
def test_a_header_with_one_bit_changed_is_refused(header, position, bit):
    with pair() as (ours, theirs):
        ours.send(header)
        message = bytearray(theirs.socket.recv(1000))
        message[position] ^= 1 << bit
        ours.socket.sendall(message)
        with pytest.raises(HandshakeError, match="wrong tag"):
            theirs.receive()


def test_a_header_that_comes_twice_is_refused():
    with pair() as (ours, theirs):
        ours.send(Header(Kind.CALL, 0))
        message = theirs.socket.recv(1000)
        ours.socket.sendall(message + message)
        assert theirs.receive() == Header(Kind.CALL, 0)
        with pytest.raises(HandshakeError, match="wrong tag"):
            theirs.receive()


def test_headers_in_another_order_are_refused():
    with pair() as (ours, theirs):
        messages = []
        for round in (1, 2):
            ours.send(Header(Kind.SWAP, 0, round))
            messages.append(theirs.socket.recv(1000))
        ours.socket.sendall(messages[1])
        with pytest.raises(HandshakeError):
            theirs.receive()


def test_a_header_sent_back_to_its_sender_is_refused():
    with pair() as (ours, theirs):
        ours.send(Header(Kind.CALL, 0))
        theirs.socket.sendall(theirs.socket.recv(1000))
        with pytest.raises(HandshakeError):
            ours.receive()


@given(st.binary(max_size=120))
@example(bytes(HEADER_BYTES))
def test_garbage_is_no_header(garbage):
    with pair() as (ours, theirs):
        ours.socket.sendall(garbage)
        ours.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            theirs.receive()


@given(st.binary(min_size=48, max_size=48))
@example(Header(Kind.CALL, 2**50).pack())
def test_any_bytes_are_a_header_or_a_clean_refusal(packed):
    try:
        header = Header.unpack(packed)
    except HandshakeError:
        return
    assert header.pack() == packed[:1] + bytes(3) + packed[4:32] + bytes(8) + packed[40:]
    assert header.kind in Kind
    assert header.nbytes <= framing.MESSAGE_LIMIT_BYTES


def test_a_size_beyond_the_limit_is_refused_even_from_a_learner_of_the_run():
    with pair() as (ours, theirs):
        ours.send(Header(Kind.CALL, 2**50))
        with pytest.raises(HandshakeError, match="more than any model has"):
            theirs.receive()


@pytest.mark.parametrize("nbytes", [0, 1, 3 * 2**20])
def test_a_payload_arrives_whole(nbytes):
    payload, received = torch.randint(0, 256, (nbytes,), dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    with pair() as (ours, theirs):
        sender = threading.Thread(target=ours.send, args=(Header(Kind.CALL, nbytes), payload))
        sender.start()
        theirs.receive_into(received, theirs.receive())
        sender.join(10)
    assert torch.equal(payload, received)


def test_a_stream_that_ends_early_is_an_error():
    with pair() as (ours, theirs):
        theirs.socket.sendall(b"abc")
        theirs.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="the connection was closed"):
            ours.receive_into(torch.zeros(10, dtype=torch.uint8), Header(Kind.CALL, 10))


def tensor(data):
    return torch.tensor(list(data), dtype=torch.uint8)


@given(st.binary(min_size=1, max_size=5000), st.data())
def test_a_payload_with_one_bit_changed_is_refused_and_what_follows_is_understood(data, draw):
    position, bit = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(0, 7))
    with pair() as (ours, theirs):
        ours.send(Header(Kind.CALL, len(data)), tensor(data))
        message = bytearray(theirs.socket.recv(10_000))
        message[HEADER_BYTES + position] ^= 1 << bit
        ours.socket.sendall(message)
        ours.send(Header(Kind.RECEIVED, 0))
        received = torch.zeros(len(data), dtype=torch.uint8)
        with pytest.raises(RefusedError, match="learner 0 was refused: checksum"):
            theirs.receive_into(received, theirs.receive())
        assert theirs.receive().kind == Kind.RECEIVED


def test_a_payload_of_another_size_than_expected_is_refused():
    with pair() as (ours, theirs):
        ours.send(Header(Kind.CALL, 4), tensor(b"abcd"))
        with pytest.raises(HandshakeError, match="sends 4 bytes, but 3 are expected"):
            theirs.receive_into(torch.zeros(3, dtype=torch.uint8), theirs.receive())


@pytest.mark.parametrize("reason", ["non-finite weights", "ä" * 300, ""])
def test_a_refusal_tells_why(reason):
    with pair() as (ours, theirs):
        theirs.refuse(reason)
        with pytest.raises(RefusedError) as refusal:
            ours.receive_kind(Kind.REPLY)
        assert refusal.value.peer == 1
        assert refusal.value.reason == (reason[:100] or "?")


def test_a_peer_that_serves_no_more_calls_is_lost_and_an_answer_of_another_kind_is_refused():
    with pair() as (ours, theirs):
        theirs.refuse(NO_CALLS)
        for kind in (Kind.SWAP, Kind.REPLY):
            theirs.send(Header(kind, 0))
        with pytest.raises(PeerLostError, match="serves no more calls"):
            ours.receive_kind(Kind.REPLY)
        with pytest.raises(HandshakeError, match="sent SWAP, but REPLY was expected"):
            ours.receive_kind(Kind.REPLY)
        assert ours.receive_kind(Kind.REPLY) == Header(Kind.REPLY, 0)
