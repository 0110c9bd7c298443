import os
import socket
import ssl
import subprocess
import threading
import time

import pytest
import torch
from exchanges import answering, calling
from loopback import PATIENCE_S, loopback, together

from roundelay.errors import ConfigError, HandshakeError, PeerLostError
from roundelay.transport import handshake, security
from roundelay.transport.base import Swap
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.security import Security

PLAIN = Security(b"s" * 32)


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return PLAIN.with_tls(tmp_path_factory.mktemp("run") / "tls")


def test_a_certificate_is_made_once_and_its_key_is_for_the_owner_only(tmp_path):
    first = PLAIN.with_tls(tmp_path / "new" / "tls").tls
    assert PLAIN.with_tls(first.folder).tls.der == first.der
    assert (first.folder / "key.pem").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in first.folder.iterdir()) == ["cert.pem", "key.pem"]
    assert first.der != PLAIN.with_tls(tmp_path / "other").tls.der


def test_without_openssl_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(security.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"install it, or put cert.pem and key.pem into"):
        PLAIN.with_tls(tmp_path)


@pytest.mark.parametrize("broken", ["cert.pem", "key.pem"])
def test_files_that_are_no_certificate_are_refused(tmp_path, broken):
    PLAIN.with_tls(tmp_path)
    (tmp_path / broken).write_text("nonsense")
    with pytest.raises(ConfigError, match=r"must have cert.pem and its key.pem for TLS"):
        PLAIN.with_tls(tmp_path)


def test_a_key_of_another_certificate_is_refused(tmp_path):
    PLAIN.with_tls(tmp_path / "a")
    PLAIN.with_tls(tmp_path / "b")
    (tmp_path / "a" / "key.pem").replace(tmp_path / "b" / "key.pem")
    with pytest.raises(ConfigError, match=r"KEY_VALUES_MISMATCH|mismatch"):
        PLAIN.with_tls(tmp_path / "b")


def test_the_environment_carries_the_secret_the_run_and_the_certificate(tls):
    told = Security.from_environment(tls.environment())
    assert told.secret == tls.secret
    assert told.tls.der == tls.tls.der
    named = Security(b"x" * 16, run="a name")
    assert Security.from_environment(named.environment()) == named
    assert Security.from_environment({}) is None


@pytest.mark.parametrize("secret", ["", "xyz", "00" * 15])
def test_a_secret_that_is_too_short_or_no_number_is_refused_and_not_shown(secret):
    with pytest.raises(ConfigError, match="at least 32 hexadecimal digits") as refusal:
        Security.from_environment({"ROUNDELAY_SECRET": secret})
    assert not secret or secret not in str(refusal.value)


def test_the_secret_is_not_printed(tls):
    assert "s" * 32 not in repr(tls)
    assert b"s".hex() * 32 not in repr(tls)


def test_keys_differ_by_secret_run_and_purpose():
    keys = {
        Security(secret, run).key(purpose) for secret in (b"a", b"b") for run in ("", "x") for purpose in (b"p", b"q")
    }
    assert len(keys) == 8


# On the wire -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared", "sockets"])
@pytest.mark.parametrize("nbytes", [8, 3 * 2**20])
def test_calls_and_swaps_work_over_tls(tls, share_memory, nbytes):
    with loopback(3, share_memory=share_memory, security=tls) as transports:
        for transport in transports:
            transport.serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))

        def work(rank):
            transport, peer = transports[rank], (rank + 1) % 3
            buffer = transport.allocate(nbytes)
            incoming = {other: transport.allocate(nbytes) for other in range(3) if other != rank}
            for round in range(4):
                transport.call(peer, calling(buffer.fill_(7))).result(PATIENCE_S)
                assert (buffer == 8).all()
                transport.swap(Swap(round, buffer.fill_(10 * round + rank), incoming)).result(PATIENCE_S)
                assert all((got == 10 * round + other).all() for other, got in incoming.items())
            transport.finish(buffer, (0, 1, 2)).result(PATIENCE_S)

        together(3, work)
        for transport in transports:
            transport.check()


def test_the_death_of_a_peer_is_noticed_over_tls(tls):
    with loopback(2, share_memory=False, security=tls) as (a, b):
        pending = a.call(1, calling(a.allocate(2**20)))
        b._detector._say = lambda message: None  # as SIGKILL: no goodbye
        b.close()
        assert isinstance(pending.exception(PATIENCE_S), PeerLostError)


def test_a_goodbye_is_understood_over_tls(tls):
    with loopback(2, security=tls) as (a, b):
        future = a.all_reduce(torch.zeros(1), (0, 1))
        b.close("ValueError: no data")
        assert str(future.exception(PATIENCE_S)) == "lost learner 1: it gave up (ValueError: no data)"


def test_a_thread_that_is_blocked_on_an_encrypted_connection_wakes_when_it_is_shut_down(tls):
    with loopback(2, share_memory=False, security=tls) as (_, b), b._connections.to(0) as connection:
        ended = threading.Event()

        def read():
            with pytest.raises(OSError):  # noqa: PT011
                connection.receive()
            ended.set()

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.05)
        connection.socket.shutdown(socket.SHUT_RDWR)
        assert ended.wait(PATIENCE_S)
        thread.join(PATIENCE_S)
        with pytest.raises(OSError):  # noqa: PT011  # nothing is sent unencrypted afterwards
            connection.socket.sendall(b"secret weights")


class Tap:
    """Passes bytes on between a caller and a learner, and remembers them."""

    def __init__(self, target):
        self.seen, self._target = bytearray(), target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        caller, _ = self._listener.accept()
        answerer = socket.create_connection(self._target)
        threads = [threading.Thread(target=self._pass, args=ends) for ends in ((caller, answerer), (answerer, caller))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        caller.close()
        answerer.close()
        self._listener.close()

    def _pass(self, source, target):
        try:
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.mark.parametrize("encrypted", [True, False])
def test_with_tls_the_weights_cannot_be_read_on_the_way(tls, encrypted):
    with loopback(2, share_memory=False, security=tls if encrypted else PLAIN) as (a, b):
        b.serve(answering(lambda peer, request, reply: None))
        tap = Tap(a._connections._addresses[1])
        a._connections._addresses[1] = tap.address
        buffer = a.allocate(100_000).fill_(0xAB)
        a.call(1, calling(buffer)).result(PATIENCE_S)
    assert len(tap.seen) > 200_000
    assert (b"\xab" * 64 in tap.seen) == (not encrypted)


def refused_by(answering, calling):
    """What both ends of a handshake say."""
    outcome = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            try:
                outcome.append(handshake.accept(listener.accept()[0], 1, bytes(16), answering))
            except OSError as error:
                outcome.append(error)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError) as refusal:  # noqa: PT011
            handshake.connect(
                listener.getsockname()[:2], Hello(0, Purpose.REQUESTS, os.getpid(), bytes(16)), 1, calling
            )
        thread.join(PATIENCE_S)
    assert isinstance(outcome[0], OSError)
    return refusal.value, outcome[0]


def test_another_certificate_is_refused_by_both_ends(tls, tmp_path):
    calling, answering = refused_by(tls, PLAIN.with_tls(tmp_path))
    assert isinstance(calling, ssl.SSLError)
    assert isinstance(answering, ssl.SSLError)


def test_a_certificate_that_the_runs_own_has_signed_is_not_the_runs_own(tls, tmp_path):
    """The run's certificate may sign others, since openssl makes it so, but learners accept only itself."""
    commands = [
        "openssl req -newkey rsa:2048 -nodes -keyout key.pem -out request.pem -subj /CN=child",
        f"openssl x509 -req -in request.pem -CA {tls.tls.folder}/cert.pem -CAkey {tls.tls.folder}/key.pem "
        "-CAcreateserial -CAserial serial -out cert.pem -days 1",
    ]
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True, cwd=tmp_path)
    signed = PLAIN.with_tls(tmp_path)
    for context in (signed.tls.calling, signed.tls.answering):
        context.load_verify_locations(tls.tls.folder / "cert.pem")
    _, answering = refused_by(tls, signed)
    assert isinstance(answering, HandshakeError)


@pytest.mark.parametrize("tls_answers", [True, False])
def test_learners_with_and_without_tls_refuse_each_other(tls, tls_answers, monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    refused_by(*((tls, PLAIN) if tls_answers else (PLAIN, tls)))


def test_the_secret_is_needed_inside_tls_too(tls):
    wrong = Security(b"t" * 32, tls=tls.tls)
    _, answering = refused_by(tls, wrong)
    assert isinstance(answering, HandshakeError)
    assert "secret" in str(answering)


def test_machines_whose_clocks_differ_accept_the_runs_certificate(tmp_path):
    PLAIN.with_tls(tmp_path)
    command = "openssl x509 -in cert.pem -signkey key.pem -days -1 -out over.pem"
    subprocess.run(command.split(), check=True, capture_output=True, cwd=tmp_path)
    (tmp_path / "over.pem").replace(tmp_path / "cert.pem")
    with loopback(2, security=PLAIN.with_tls(tmp_path)) as (a, b):
        b.serve(answering(lambda peer, request, reply: None))
        a.call(1, calling(a.allocate(8))).result(PATIENCE_S)
