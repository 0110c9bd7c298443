"""What the ends of a connection must have in common: the run's secret, and with TLS its certificate."""

from __future__ import annotations

import hmac
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from roundelay.errors import ConfigError, HandshakeError

KEYS = SECRET, RUN, TLS = "ROUNDELAY_SECRET", "ROUNDELAY_RUN", "ROUNDELAY_TLS"
CERTIFICATE, KEY = "cert.pem", "key.pem"
LEAST_SECRET_BYTES = 16

_VALID_DAYS = "3650"
# X509_V_FLAG_NO_CHECK_TIME, which Python has no name for. Both ends have the same certificate, so its dates mean nothing, and
# with the check, machines whose clocks differ could not connect while the certificate is new.
_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)


class _Socket(ssl.SSLSocket):
    """A TLS socket that one thread may shut down while another is blocked on it. Afterwards it neither reads nor sends."""

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self, how)  # SSLSocket.shutdown would go on without encryption


@dataclass(frozen=True)
class Certificate:
    """The one certificate of a run. Every learner shows it, and accepts no other.

    Attributes:
        folder: where `cert.pem` and `key.pem` are.
    """

    folder: Path
    answering: ssl.SSLContext = field(repr=False)
    calling: ssl.SSLContext = field(repr=False)
    der: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: Path) -> Certificate:
        """Raises ConfigError if the files are missing, or are not a certificate with its key."""
        path, key = folder / CERTIFICATE, folder / KEY
        try:
            der = ssl.PEM_cert_to_DER_cert(path.read_text())
            answering, calling = (_context(protocol, path, key) for protocol in _PROTOCOLS)
        except (OSError, ValueError) as error:
            raise ConfigError(f"'{folder}' must have {CERTIFICATE} and its {KEY} for TLS: {error}") from None
        answering.num_tickets = 0  # a caller that closes the connection without reading a ticket would reset it
        return cls(folder, answering, calling, der)


_PROTOCOLS = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)


def _context(protocol: int, path: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the run's, not a machine's
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= _NO_CHECK_TIME
    context.load_cert_chain(path, key)
    context.load_verify_locations(path)
    context.sslsocket_class = _Socket
    return context


def make_certificate(folder: Path) -> None:
    """Make a certificate and its key in `folder`, unless both exist. Only the owner can read the key.

    Raises ConfigError if there is no openssl command, or if it fails.
    """
    if (folder / CERTIFICATE).exists() and (folder / KEY).exists():
        return
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ConfigError(
            f"TLS needs the openssl command to make a certificate, and there is none; install it, or put {CERTIFICATE} "
            f"and {KEY} into '{folder}'"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder '{folder}' for a certificate: {error.strerror}") from None
    with tempfile.TemporaryDirectory(dir=folder) as temporary:  # for the owner only
        made = Path(temporary)
        command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-keyout", str(made / KEY), "-out", str(made / CERTIFICATE)]
        command += ["-days", _VALID_DAYS, "-subj", "/CN=a run of Roundelay"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ConfigError(f"openssl could not make a certificate: {result.stderr.strip()}")
        (made / KEY).chmod(0o600)
        for name in (KEY, CERTIFICATE):
            (made / name).replace(folder / name)


@dataclass(frozen=True)
class Security:
    """What every connection of a run must prove to know.

    Attributes:
        secret: of this run; runs that trust each other may share one, see `run`.
        run: the run's name, for runs that share a secret: their learners refuse each other.
        tls: with a certificate everything is encrypted.
    """

    secret: bytes = field(repr=False)
    run: str = ""
    tls: Certificate | None = None

    def with_tls(self, folder: Path) -> Security:
        """The same, with the certificate in `folder`, which is made if there is none.

        Raises ConfigError if it cannot be made or read.
        """
        make_certificate(folder)
        return replace(self, tls=Certificate.load(folder))

    def key(self, purpose: bytes) -> bytes:
        """A key of this run, for one purpose only."""
        return hmac.digest(self.secret, b"roundelay\0" + purpose + b"\0" + self.run.encode(), "sha256")

    def wrapped(self, connection: socket.socket, *, answering: bool) -> socket.socket:
        """The socket to use instead; nothing is sent yet."""
        if self.tls is None or isinstance(connection, ssl.SSLSocket):
            return connection
        context = self.tls.answering if answering else self.tls.calling
        return context.wrap_socket(connection, server_side=answering, do_handshake_on_connect=False)

    def encrypt(self, connection: socket.socket) -> None:
        """Do the handshake of TLS, if TLS is used, within the socket's timeout.

        Raises HandshakeError if the other end has another certificate, OSError if it has none.
        """
        if not isinstance(connection, ssl.SSLSocket):
            return
        assert self.tls is not None
        connection.do_handshake()
        if connection.getpeercert(binary_form=True) != self.tls.der:
            raise HandshakeError("the other end does not have this run's certificate")

    def environment(self) -> dict[str, str]:
        """Environment variables for a process of this run; other users of the machine cannot read them."""
        tls = {} if self.tls is None else {TLS: str(self.tls.folder)}
        return {SECRET: self.secret.hex(), RUN: self.run} | tls

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, what: str = SECRET) -> Security | None:
        """The inverse of `environment`; None if there is no secret.

        Raises ConfigError if the secret is too short or not hexadecimal, or if the files of TLS are missing. The message
        calls the secret `what`.
        """
        if SECRET not in environment:
            return None
        try:
            secret = bytes.fromhex(environment[SECRET])
        except ValueError:
            secret = b""
        if len(secret) < LEAST_SECRET_BYTES:
            raise ConfigError(
                f"{what} must be at least {2 * LEAST_SECRET_BYTES} hexadecimal digits, got other text or fewer digits; "
                "make one with: openssl rand -hex 32"
            )
        security = cls(secret, environment.get(RUN, ""))
        folder = environment.get(TLS)
        return replace(security, tls=Certificate.load(Path(folder))) if folder else security
