import contextlib
import os
import socket
import struct
import threading

import pytest
import torch
from hypothesis import example, given, strategies as st

from roundelay.errors import HandshakeError
from roundelay.transport import wire
from roundelay.transport.wire import Header, Hello, Kind, Purpose

SECRET = b"s" * 32
HOST = b"h" * 16


@contextlib.contextmanager
def pair():
    a, b = socket.socketpair()
    with a, b:
        a.settimeout(5)
        b.settimeout(5)
        yield a, b


@contextlib.contextmanager
def answering(rank=1, secret=SECRET):
    """A learner that answers one handshake; what became of it."""
    outcome = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                try:
                    outcome.append(wire.accept(connection, rank, HOST, secret))
                except OSError as error:
                    outcome.append(error)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listener.getsockname()[:2], outcome
        finally:
            thread.join(10)


def mine(rank=0, purpose=Purpose.LANE):
    return Hello(rank, purpose, os.getpid(), HOST)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_two_learners_of_one_run_learn_who_the_other_is(purpose):
    with answering(rank=1) as (address, outcome):
        connection, theirs = wire.connect(address, mine(0, purpose), 1, SECRET)
        connection.close()
    assert theirs == Hello(1, purpose, os.getpid(), HOST)
    assert outcome == [mine(0, purpose)]


def test_a_wrong_secret_is_refused_by_who_answers():
    with answering() as (address, outcome), pytest.raises(ConnectionError):
        wire.connect(address, mine(), 1, b"wrong" * 6)
    assert isinstance(outcome[0], HandshakeError)
    assert "secret" in str(outcome[0])


def test_an_answer_from_somebody_without_the_secret_is_refused():
    hello = wire._HELLO.pack(1, Purpose.LANE, 1, HOST, bytes(16))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(wire.MAGIC + bytes(16))
                connection.recv(1000)
                connection.sendall(hello + bytes(32))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(HandshakeError, match="secret"):
            wire.connect(listener.getsockname()[:2], mine(), 1, SECRET)
        thread.join(10)


def test_a_proof_cannot_be_sent_back_to_its_maker():
    """Both sides prove with the same secret, so a reflected message must not pass for an answer."""
    transcript = b"challenge"
    assert wire._proof(SECRET, b"caller", transcript) != wire._proof(SECRET, b"answerer", transcript)


def test_another_learner_than_expected_is_refused():
    with (
        answering(rank=2) as (address, _),
        pytest.raises(HandshakeError, match=r"expected learner 1 .* found learner 2"),
    ):
        wire.connect(address, mine(), 1, SECRET)


def test_a_server_that_is_no_learner_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def web_server():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=web_server)
        thread.start()
        with pytest.raises(HandshakeError, match="no learner of this version"):
            wire.connect(listener.getsockname()[:2], mine(), 1, SECRET)
        thread.join(10)


@given(garbage=st.binary(max_size=200))
@example(b"")
@example(b"GET / HTTP/1.1\r\nHost: learner\r\n\r\n" * 4)
def test_garbage_instead_of_a_hello_raises_a_connection_error(garbage):
    with pair() as (ours, theirs):
        theirs.sendall(garbage)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            wire.accept(ours, 0, HOST, SECRET)


def test_an_unknown_purpose_is_refused_even_from_who_knows_the_secret():
    challenge = b"c" * 24
    hello = wire._HELLO.pack(3, 77, 1, HOST, bytes(16))
    with pytest.raises(HandshakeError, match="purpose 77, which no learner sends"):
        wire._checked(SECRET, b"caller", challenge, hello + wire._proof(SECRET, b"caller", challenge + hello))


def test_a_silent_caller_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.05)
    with pair() as (ours, _), pytest.raises(TimeoutError):
        wire.accept(ours, 0, HOST, SECRET)


# Messages ------------------------------------------------------------------------------------------------------------

headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    nbytes=st.integers(0, wire.MESSAGE_LIMIT_BYTES),
    round=st.integers(0, 2**64 - 1),
    shared_fd=st.integers(-1, 2**31 - 1),
    offset=st.integers(0, wire.MESSAGE_LIMIT_BYTES),
)


@given(headers)
def test_a_header_arrives_as_it_was_sent(header):
    with pair() as (ours, theirs):
        wire.send(ours, header)
        assert wire.receive_header(theirs) == header


@given(st.binary(max_size=80))
@example(struct.pack("!BxxxiQQQ", 99, -1, 0, 0, 0))
@example(struct.pack("!BxxxiQQQ", 1, -1, 0, 2**63, 0))
def test_any_bytes_are_a_header_or_a_clean_refusal(garbage):
    with pair() as (ours, theirs):
        theirs.sendall(garbage)
        theirs.shutdown(socket.SHUT_WR)
        try:
            header = wire.receive_header(ours)
        except ConnectionError:
            return
        assert header.kind in Kind
        assert header.nbytes <= wire.MESSAGE_LIMIT_BYTES


def test_an_absurd_size_is_refused():
    with pair() as (ours, theirs):
        theirs.sendall(Header(Kind.CALL, 2**50).pack())
        with pytest.raises(HandshakeError, match="more than any model has"):
            wire.receive_header(ours)


@pytest.mark.parametrize("nbytes", [0, 1, 3 * 2**20])
def test_a_payload_arrives_whole(nbytes):
    payload, received = torch.randint(0, 256, (nbytes,), dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    with pair() as (ours, theirs):
        sender = threading.Thread(target=wire.send, args=(ours, Header(Kind.CALL, nbytes), payload))
        sender.start()
        assert wire.receive_header(theirs).nbytes == nbytes
        wire.receive_into(theirs, received)
        sender.join(10)
    assert torch.equal(payload, received)


def test_a_stream_that_ends_early_is_an_error():
    with pair() as (ours, theirs):
        theirs.sendall(b"abc")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="in the middle of a message"):
            wire.receive_into(ours, torch.zeros(10, dtype=torch.uint8))


def test_processes_of_one_machine_know_each_other():
    assert wire.this_host() == wire.this_host()
    assert len(wire.this_host()) == 16
