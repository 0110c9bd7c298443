"""The handshake with which every connection of a run begins: both ends prove that they know the run's secret."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from enum import IntEnum

from roundelay.errors import HandshakeError
from roundelay.transport.framing import known
from roundelay.transport.security import Security

MAGIC = b"rndelay2"
HANDSHAKE_S = 5.0

_NONCE_BYTES, _PROOF_BYTES = 16, 32
_CALL = struct.Struct(f"!iiBi16s{_NONCE_BYTES}s")  # caller, wanted learner, purpose, process, host, nonce
_ANSWER = struct.Struct("!ii16s")  # answerer, process, host


class Purpose(IntEnum):
    """What a connection is for."""

    HEARTBEAT = 1  # heartbeats and goodbyes, both ways
    REQUESTS = 2  # calls, swaps and state, asked for by the side that connected
    RENDEZVOUS = 3  # a learner asks the rendezvous of its run
    RECONNECT = 4  # heartbeats again, with a peer that could not be reached for a while
    PROBE = 5  # nothing: the caller wants to know whether it can reach this learner


@dataclass(frozen=True)
class Hello:
    """One end of a connection as it introduces itself, and the keys for our messages and for the peer's."""

    rank: int
    purpose: Purpose
    pid: int
    host: bytes  # equal for processes that can map each other's memory
    keys: tuple[bytes, bytes] = field(default=(b"", b""), repr=False, compare=False)


def this_host() -> bytes:
    """An id that is equal for two processes if they run on one kernel, see each other's process ids, and share the loopback."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    except OSError:
        boot, namespaces = secrets.token_bytes(16), []
    return hashlib.sha256(boot + " ".join(namespaces).encode()).digest()[:16]


def tune(connection: socket.socket) -> None:
    """No delay, no timeout: the failure detector shuts the socket of a lost peer down to wake its threads."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)


def connect(address: tuple[str, int], mine: Hello, expected: int, security: Security) -> tuple[socket.socket, Hello]:
    """Connect to learner `expected` and prove to each other that both know the secret.

    Raises HandshakeError if the other end is not that learner, OSError if there is no other end.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    connection = security.wrapped(socket.create_connection(address, timeout=HANDSHAKE_S), answering=False)
    try:
        security.encrypt(connection)
        challenge = _receive(connection, len(MAGIC) + _NONCE_BYTES, deadline)
        if challenge[: len(MAGIC)] != MAGIC:
            raise HandshakeError(
                f"{address[0]}:{address[1]} is no learner of this version; install the same version on all machines"
            )
        nonce = secrets.token_bytes(_NONCE_BYTES)
        call = _CALL.pack(mine.rank, expected, mine.purpose, mine.pid, mine.host, nonce)
        connection.sendall(call + _proof(security, b"caller", challenge + call))
        answer = _receive(connection, _ANSWER.size + _PROOF_BYTES, deadline)
        transcript = _checked(security, b"answerer", challenge + call, answer)
        rank, pid, host = _ANSWER.unpack(answer[: _ANSWER.size])
        if rank != expected:
            raise HandshakeError(f"expected learner {expected} at {address[0]}:{address[1]}, found learner {rank}")
    except BaseException:
        connection.close()
        raise
    tune(connection)
    return connection, Hello(rank, mine.purpose, pid, host, _keys(security, transcript))


def accept(connection: socket.socket, rank: int, host: bytes, security: Security) -> tuple[socket.socket, Hello]:
    """The answering side of `connect`. Use the socket that it returns.

    Raises HandshakeError or OSError, with the socket closed, if the caller does not know the secret.
    """
    connection = security.wrapped(connection, answering=True)
    try:
        return connection, _accepted(connection, rank, host, security)
    except BaseException:
        connection.close()
        raise


def _accepted(connection: socket.socket, rank: int, host: bytes, security: Security) -> Hello:
    deadline = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    security.encrypt(connection)
    challenge = MAGIC + secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(challenge)
    message = _receive(connection, _CALL.size + _PROOF_BYTES, deadline)
    transcript = _checked(security, b"caller", challenge, message)
    caller, wanted, number, pid, their_host, _ = _CALL.unpack(message[: _CALL.size])
    purpose = known(Purpose, number)
    if wanted != rank:
        raise HandshakeError(f"learner {caller} expected learner {wanted} here, but this is learner {rank}")
    # A container or another user may keep us out of the caller's memory. A zero host makes the caller use the socket.
    reachable = their_host == host and os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK)
    answer = _ANSWER.pack(rank, os.getpid(), host if reachable else bytes(16))
    connection.sendall(answer + _proof(security, b"answerer", transcript + answer))
    tune(connection)
    theirs, ours = _keys(security, transcript + answer)
    return Hello(caller, purpose, pid, their_host, (ours, theirs))


def _proof(security: Security, side: bytes, transcript: bytes) -> bytes:
    """Proof that this side knows the secret. It covers all earlier bytes with fresh nonces, so it cannot be replayed."""
    return hmac.digest(security.key(b"proof of the " + side), transcript, "sha256")


def _keys(security: Security, transcript: bytes) -> tuple[bytes, bytes]:
    """Keys for the caller's and for the answerer's messages, on this connection only."""
    key = security.key(b"session")
    caller, answerer = (hmac.digest(key, side + transcript, "sha256") for side in (b"caller", b"answerer"))
    return caller, answerer


def _checked(security: Security, side: bytes, before: bytes, message: bytes) -> bytes:
    """The transcript up to and with this message. Raises HandshakeError if its proof is wrong."""
    said, proof = before + message[:-_PROOF_BYTES], message[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(security, side, said)):
        raise HandshakeError("the other end does not know this run's secret")
    return said


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Bytes of a handshake, all before the deadline: a slow sender cannot stretch it."""
    data = b""
    while len(data) < nbytes:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError(f"the handshake was not over within {HANDSHAKE_S:g} s")
        connection.settimeout(left)
        piece = connection.recv(nbytes - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return data
