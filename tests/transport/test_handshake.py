import contextlib
import ctypes
import multiprocessing
import os
import socket
import threading

import pytest
from ends import socket_pair
from hypothesis import example, given, strategies as st

from roundelay.errors import HandshakeError
from roundelay.transport import handshake
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.security import Security

SECURITY = Security(b"s" * 32)
HOST = b"h" * 16

CLONE_NEWNET = 0x40000000


@contextlib.contextmanager
def served_once(serve):
    """A listener whose first connection is given to `serve`; its address, and a list for the result or the error."""
    outcome = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                try:
                    outcome.append(serve(connection))
                except OSError as error:
                    outcome.append(error)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listener.getsockname()[:2], outcome
        finally:
            thread.join(10)


def answering(rank=1, security=SECURITY):
    """A learner that answers one handshake."""
    return served_once(lambda connection: handshake.accept(connection, rank, HOST, security)[1])


def mine(rank=0, purpose=Purpose.REQUESTS):
    return Hello(rank, purpose, os.getpid(), HOST)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_two_learners_of_one_run_learn_each_others_rank(purpose):
    with answering(rank=1) as (address, outcome):
        connection, theirs = handshake.connect(address, mine(0, purpose), 1, SECURITY)
        connection.close()
    assert theirs == Hello(1, purpose, os.getpid(), HOST)
    assert outcome == [mine(0, purpose)]


def test_both_ends_have_the_same_keys_which_are_new():
    seen = set()
    for _ in range(2):
        with answering() as (address, outcome):
            connection, theirs = handshake.connect(address, mine(), 1, SECURITY)
            connection.close()
        assert theirs.keys == outcome[0].keys[::-1]
        seen.update(theirs.keys)
    assert len(seen) == 4
    assert all(len(key) == 32 for key in seen)


@pytest.mark.parametrize("wrong", [Security(b"wrong" * 6), Security(SECURITY.secret, run="another")])
def test_a_wrong_secret_or_another_run_is_refused_by_the_answering_learner(wrong):
    with answering() as (address, outcome), pytest.raises(ConnectionError):
        handshake.connect(address, mine(), 1, wrong)
    assert isinstance(outcome[0], HandshakeError)
    assert "secret" in str(outcome[0])


def test_an_answer_without_the_secret_is_refused():
    def impostor(connection):
        connection.sendall(handshake.MAGIC + bytes(16))
        connection.recv(1000)
        connection.sendall(handshake._ANSWER.pack(1, 1, HOST) + bytes(32))

    with served_once(impostor) as (address, _), pytest.raises(HandshakeError, match="secret"):
        handshake.connect(address, mine(), 1, SECURITY)


def test_a_proof_sent_back_to_its_sender_is_refused():
    """Both sides prove with the same secret, so a reflected message must not pass for an answer."""

    def mirror(connection):
        connection.sendall(handshake.MAGIC + bytes(16))
        call = connection.recv(1000)
        connection.sendall(call[: handshake._ANSWER.size] + call[-32:])

    with served_once(mirror) as (address, _), pytest.raises(HandshakeError, match="secret"):
        handshake.connect(address, mine(), 1, SECURITY)


def test_a_recorded_handshake_cannot_be_played_again():
    recorded = []

    def tapped(connection):
        class Tap:
            def __getattr__(self, name):
                return getattr(connection, name)

            def recv(self, nbytes):
                recorded.append(connection.recv(nbytes))
                return recorded[-1]

        return handshake.accept(Tap(), 1, HOST, SECURITY)[1]

    with served_once(tapped) as (address, outcome):
        handshake.connect(address, mine(), 1, SECURITY)[0].close()
    assert outcome == [mine()]
    with socket_pair() as (ours, theirs):
        theirs.sendall(b"".join(recorded))
        with pytest.raises(HandshakeError, match="secret"):
            handshake.accept(ours, 1, HOST, SECURITY)


def test_a_recorded_answer_cannot_be_played_again():
    said = []

    def tapped(connection):
        class Tap:
            def __getattr__(self, name):
                return getattr(connection, name)

            def sendall(self, data):
                said.append(data)
                connection.sendall(data)

        return handshake.accept(Tap(), 1, HOST, SECURITY)[1]

    with served_once(tapped) as (address, _):
        handshake.connect(address, mine(), 1, SECURITY)[0].close()
    challenge, answer = said

    def replay(connection):
        connection.sendall(challenge)
        connection.recv(1000)
        connection.sendall(answer)

    with served_once(replay) as (address, _), pytest.raises(HandshakeError, match="secret"):
        handshake.connect(address, mine(), 1, SECURITY)


@given(position=st.integers(0, handshake._CALL.size + 31), bit=st.integers(0, 7))
def test_no_bit_of_a_call_can_be_changed_on_the_way(position, bit):
    call = handshake._CALL.pack(0, 1, Purpose.REQUESTS, 7, HOST, b"n" * 16)
    challenge = b"c" * 24
    message = bytearray(call + handshake._proof(SECURITY, b"caller", challenge + call))
    assert handshake._checked(SECURITY, b"caller", challenge, bytes(message)) == challenge + call
    message[position] ^= 1 << bit
    with pytest.raises(HandshakeError, match="secret"):
        handshake._checked(SECURITY, b"caller", challenge, bytes(message))


def test_another_learner_than_expected_is_refused_by_both_ends():
    with answering(rank=2) as (address, outcome), pytest.raises(ConnectionError):
        handshake.connect(address, mine(), 1, SECURITY)
    assert "learner 0 expected learner 1 here, but this is learner 2" in str(outcome[0])


def test_an_answer_in_the_name_of_another_learner_is_refused():
    def liar(connection):
        challenge = handshake.MAGIC + bytes(16)
        connection.sendall(challenge)
        call = connection.recv(1000)[: handshake._CALL.size]
        answer = handshake._ANSWER.pack(2, 1, HOST)
        connection.sendall(answer + handshake._proof(SECURITY, b"answerer", challenge + call + answer))

    with (
        served_once(liar) as (address, _),
        pytest.raises(HandshakeError, match=r"expected learner 1 .* found learner 2"),
    ):
        handshake.connect(address, mine(), 1, SECURITY)


def test_a_server_that_is_no_learner_is_refused():
    def web_server(connection):
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with served_once(web_server) as (address, _), pytest.raises(HandshakeError, match="no learner of this version"):
        handshake.connect(address, mine(), 1, SECURITY)


@given(garbage=st.binary(max_size=200))
@example(b"")
@example(b"GET / HTTP/1.1\r\nHost: learner\r\n\r\n" * 4)
def test_garbage_instead_of_a_call_raises_a_connection_error(garbage):
    with socket_pair() as (ours, theirs):
        theirs.sendall(garbage)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            handshake.accept(ours, 0, HOST, SECURITY)


def test_an_unknown_purpose_is_refused_even_from_a_learner_of_the_run():
    with answering() as (address, outcome), socket.create_connection(address, timeout=5) as connection:
        challenge = connection.recv(1000)
        call = handshake._CALL.pack(0, 1, 77, 1, HOST, bytes(16))
        connection.sendall(call + handshake._proof(SECURITY, b"caller", challenge + call))
        assert connection.recv(1000) == b""
    assert "purpose 77, which no learner sends" in str(outcome[0])


def test_a_handshake_with_a_silent_caller_times_out(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.05)
    with socket_pair() as (ours, _), pytest.raises(TimeoutError):
        handshake.accept(ours, 0, HOST, SECURITY)


def test_a_handshake_with_a_caller_that_sends_single_bytes_times_out(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.1)
    stop = threading.Event()
    with socket_pair() as (ours, theirs):

        def trickle():
            with contextlib.suppress(OSError):
                while not stop.wait(0.02):
                    theirs.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(TimeoutError):
            handshake.accept(ours, 0, HOST, SECURITY)
        stop.set()
        thread.join(5)


def test_the_id_of_this_machine_is_always_the_same():
    assert handshake.this_host() == handshake.this_host()
    assert len(handshake.this_host()) == 16


def in_another_network(pipe):
    """Send the id of this machine as a process sees it that has a network of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        pipe.send(os.strerror(ctypes.get_errno()))
    else:
        pipe.send(handshake.this_host())


def test_a_process_with_a_network_of_its_own_is_on_another_machine():
    """It cannot be reached over the loopback."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=in_another_network, args=(theirs,))
    process.start()
    other = ours.recv()
    process.join()
    if isinstance(other, str):
        pytest.skip(f"no network namespace can be made here: {other}")
    assert len(other) == 16
    assert other != handshake.this_host()
