import contextlib
import socket
import threading

import pytest
import torch
from hypothesis import example, given, strategies as st

from roundelay.errors import HandshakeError
from roundelay.transport import channel as channels
from roundelay.transport.channel import Channel, Header, Kind

KEYS = (b"a" * 32, b"b" * 32)


@contextlib.contextmanager
def pair():
    """Two ends of a channel."""
    a, b = socket.socketpair()
    with a, b:
        a.settimeout(5)
        b.settimeout(5)
        yield Channel(a, *KEYS), Channel(b, *KEYS[::-1])


headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    nbytes=st.integers(0, channels.MESSAGE_LIMIT_BYTES),
    round=st.integers(0, 2**64 - 1),
    shared_fd=st.integers(-1, 2**31 - 1),
    offset=st.integers(0, channels.MESSAGE_LIMIT_BYTES),
)


@given(st.lists(headers, max_size=3))
def test_headers_arrive_as_they_were_sent(sent):
    with pair() as (ours, theirs):
        for header in sent:
            ours.send(header)
            theirs.send(header)
        assert [theirs.receive() for _ in sent] == sent
        assert [ours.receive() for _ in sent] == sent


@given(headers, st.integers(0, 47), st.integers(0, 7))
def test_a_header_with_one_bit_changed_is_refused(header, position, bit):
    with pair() as (ours, theirs):
        ours.send(header)
        message = bytearray(theirs.connection.recv(1000))
        message[position] ^= 1 << bit
        ours.connection.sendall(message)
        with pytest.raises(HandshakeError, match="has not sealed"):
            theirs.receive()


def test_a_header_that_comes_twice_is_refused():
    with pair() as (ours, theirs):
        ours.send(Header(Kind.CALL, 0))
        message = theirs.connection.recv(1000)
        ours.connection.sendall(message + message)
        assert theirs.receive() == Header(Kind.CALL, 0)
        with pytest.raises(HandshakeError, match="not as its next one"):
            theirs.receive()


def test_headers_that_change_places_are_refused():
    with pair() as (ours, theirs):
        messages = []
        for round in (1, 2):
            ours.send(Header(Kind.SWAP, 0, round))
            messages.append(theirs.connection.recv(1000))
        ours.connection.sendall(messages[1])
        with pytest.raises(HandshakeError):
            theirs.receive()


def test_a_header_sent_back_to_its_maker_is_refused():
    with pair() as (ours, theirs):
        ours.send(Header(Kind.CALL, 0))
        theirs.connection.sendall(theirs.connection.recv(1000))
        with pytest.raises(HandshakeError):
            ours.receive()


@given(st.binary(max_size=120))
@example(bytes(48))
def test_garbage_is_no_header(garbage):
    with pair() as (ours, theirs):
        ours.connection.sendall(garbage)
        ours.connection.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            theirs.receive()


@given(st.binary(min_size=32, max_size=32))
@example(Header(Kind.CALL, 2**50).pack())
@example(Header(Kind.CALL, 8, offset=2**50).pack())
def test_any_bytes_are_a_header_or_a_clean_refusal(packed):
    try:
        header = Header.unpack(packed)
    except HandshakeError:
        return
    assert header.pack() == packed[:1] + bytes(3) + packed[4:]
    assert header.kind in Kind
    assert max(header.nbytes, header.offset) <= channels.MESSAGE_LIMIT_BYTES


def test_an_absurd_size_is_refused_even_from_who_knows_the_secret():
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
        assert theirs.receive().nbytes == nbytes
        theirs.receive_into(received)
        sender.join(10)
    assert torch.equal(payload, received)


def test_a_stream_that_ends_early_is_an_error():
    with pair() as (ours, theirs):
        theirs.connection.sendall(b"abc")
        theirs.connection.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="in the middle of a message"):
            ours.receive_into(torch.zeros(10, dtype=torch.uint8))
