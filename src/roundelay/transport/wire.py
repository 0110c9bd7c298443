"""Bytes on a socket: framed headers, whole buffers, and the handshake with which every connection begins."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from torch import Tensor

from roundelay.errors import HandshakeError

MAGIC = b"rndelay1"
HANDSHAKE_S = 5.0
SOCKET_BUFFER_BYTES = 4 * 2**20  # few wake-ups per model

MESSAGE_LIMIT_BYTES = 2**40

_HEADER = struct.Struct("!BxxxiQQQ")
_HELLO = struct.Struct("!iBi16s16s")
Name = TypeVar("Name", bound=IntEnum)


class Purpose(IntEnum):
    """What a connection is for."""

    WATCH = 1  # heartbeats and goodbyes, both ways
    LANE = 2  # calls and swaps, begun by the side that connected
    DRAWS = 3  # a learner asks the coordinator of its run


class Kind(IntEnum):
    """What a message on a lane is."""

    CALL = 1
    REPLY = 2
    REFUSED = 3
    SWAP = 4
    TAKEN = 5


@dataclass(frozen=True)
class Header:
    """Precedes every payload. With `shared_fd` >= 0 there is none: it lies at `offset` of the sender's shared memory."""

    kind: Kind
    nbytes: int
    round: int = 0
    shared_fd: int = -1
    offset: int = 0

    def pack(self) -> bytes:
        """As it travels."""
        return _HEADER.pack(self.kind, self.shared_fd, self.round, self.nbytes, self.offset)


@dataclass(frozen=True)
class Hello:
    """Who is at the other end."""

    rank: int
    purpose: Purpose
    pid: int
    host: bytes  # equal for processes that can map each other's memory


def this_host() -> bytes:
    """Equal for two processes if they run on one kernel and see each other's process ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        namespace = os.readlink("/proc/self/ns/pid").encode()
    except OSError:
        boot, namespace = secrets.token_bytes(16), b""
    return hashlib.sha256(boot + namespace).digest()[:16]


def tune(connection: socket.socket) -> None:
    """Large buffers, no delay, truly blocking: a watcher that gives a peer up shuts the socket down to wake its threads."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)


def connect(address: tuple[str, int], mine: Hello, expected: int, secret: bytes) -> tuple[socket.socket, Hello]:
    """Connect to learner `expected` and prove to each other that both know the secret."""
    connection = socket.create_connection(address, timeout=HANDSHAKE_S)
    try:
        challenge = _receive(connection, len(MAGIC) + 16)
        if challenge[: len(MAGIC)] != MAGIC:
            raise HandshakeError(f"{address[0]}:{address[1]} is no learner of this version")
        nonce = secrets.token_bytes(16)
        hello = _HELLO.pack(mine.rank, mine.purpose, mine.pid, mine.host, nonce)
        connection.sendall(hello + _proof(secret, b"caller", challenge + hello))
        answer = _receive(connection, _HELLO.size + 32)
        theirs = _checked(secret, b"answerer", challenge + hello, answer)
        if theirs.rank != expected:
            raise HandshakeError(
                f"expected learner {expected} at {address[0]}:{address[1]}, found learner {theirs.rank}"
            )
    except BaseException:
        connection.close()
        raise
    tune(connection)
    return connection, theirs


def accept(connection: socket.socket, rank: int, host: bytes, secret: bytes) -> Hello:
    """The other end of `connect`. Raises HandshakeError or OSError; the connection is the caller's to close."""
    connection.settimeout(HANDSHAKE_S)
    challenge = MAGIC + secrets.token_bytes(16)
    connection.sendall(challenge)
    message = _receive(connection, _HELLO.size + 32)
    theirs = _checked(secret, b"caller", challenge, message)
    # A container or another user may keep us out of the caller's memory; being like no other host, it sends by socket.
    reachable = theirs.host == host and os.access(f"/proc/{theirs.pid}/fd", os.R_OK | os.X_OK)
    hello = _HELLO.pack(rank, theirs.purpose, os.getpid(), host if reachable else bytes(16), bytes(16))
    connection.sendall(hello + _proof(secret, b"answerer", challenge + message[: _HELLO.size] + hello))
    tune(connection)
    return theirs


def _proof(secret: bytes, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, side + transcript, "sha256")


def _checked(secret: bytes, side: bytes, before: bytes, message: bytes) -> Hello:
    hello, proof = message[: _HELLO.size], message[_HELLO.size :]
    if not hmac.compare_digest(proof, _proof(secret, side, before + hello)):
        raise HandshakeError("the other end does not know this run's secret")
    rank, purpose, pid, host, _ = _HELLO.unpack(hello)
    return Hello(rank, _known(Purpose, purpose), pid, host)


def _known(names: type[Name], number: int) -> Name:
    """Garbage ends the connection it came on, and nothing else."""
    try:
        return names(number)
    except ValueError:
        raise HandshakeError(f"the other end sent {names.__name__.lower()} {number}, which no learner sends") from None


def send(connection: socket.socket, header: Header, payload: Tensor | None = None) -> int:
    """Send a message; the number of bytes."""
    packed = header.pack()
    if payload is None:
        connection.sendall(packed)
        return len(packed)
    connection.sendall(packed, socket.MSG_MORE)
    connection.sendall(_bytes(payload))
    return len(packed) + payload.nbytes


def receive_header(connection: socket.socket) -> Header:
    """The next header. Raises ConnectionError at the end of the stream, HandshakeError for what no learner sends."""
    kind, shared_fd, round, nbytes, offset = _HEADER.unpack(_receive(connection, _HEADER.size))
    if max(nbytes, offset) > MESSAGE_LIMIT_BYTES:
        raise HandshakeError(f"the other end announced {nbytes} bytes at offset {offset}, more than any model has")
    return Header(_known(Kind, kind), nbytes, round, shared_fd, offset)


def receive_into(connection: socket.socket, buffer: Tensor) -> None:
    """Fill `buffer`, in as few calls as the kernel allows."""
    view = _bytes(buffer)
    while view:
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("the connection was closed in the middle of a message")
        view = view[count:]


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return data


def _bytes(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]  # NumPy says so from Python 3.12 on
