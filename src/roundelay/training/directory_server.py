"""The directory of a run on one machine, served to the learners of other machines: checkpoints and metrics.

Every machine of a run may have its own directory. The supervisor of a machine serves what others need of it, over
connections that prove to know the run's secret.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import socket
import threading
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.server import open_listener
from roundelay.errors import HandshakeError, RefusedError
from roundelay.training import checkpoint
from roundelay.training.run_directory import CONFIG
from roundelay.transport import handshake
from roundelay.transport.acceptor import Acceptor
from roundelay.transport.connections import shut_down
from roundelay.transport.framing import Connection, Header, Kind
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.refusals import Refusals
from roundelay.transport.security import Security

LISTING = "listing"
METRICS = "metrics*.jsonl"
_FILES = re.compile(r"checkpoints/\d{15}/learner-\d+\.safetensors|metrics[\w.-]*\.jsonl")
_RANK = -2  # of a server of files in handshakes: no learner has it
_LONGEST_NAME_BYTES = 200


@dataclass(frozen=True)
class Listing:
    """What a directory holds.

    Attributes:
        directory: equal for two machines if they see the same directory, on a file system that they share.
        pieces: the files of learners in every checkpoint; see `checkpoint.pieces`.
        complete: samples seen at the complete checkpoints.
        metrics: names of the files of metrics.
        machine: a name of the machine and its directory.
    """

    directory: str
    pieces: checkpoint.Pieces
    complete: list[int]
    metrics: list[str]
    machine: str

    @classmethod
    def of(cls, folder: Path) -> Listing:
        """What `folder` holds at the moment."""
        checkpoints = folder / "checkpoints"
        complete = [each.samples_seen for each in checkpoint.complete(checkpoints)]
        metrics = sorted(path.name for path in folder.glob(METRICS))
        return cls(directory_id(folder), checkpoint.pieces(checkpoints), complete, metrics, machine_name(folder))

    @classmethod
    def from_table(cls, table: Any) -> Listing:  # noqa: ANN401
        """Parse the plain values that `asdict` gives, after they have travelled as JSON."""
        pieces = {
            int(samples_seen): {int(learner): piece for learner, piece in learners.items()}
            for samples_seen, learners in table["pieces"].items()
        }
        complete, metrics = list(map(int, table["complete"])), list(map(str, table["metrics"]))
        return cls(str(table["directory"]), pieces, complete, metrics, str(table["machine"]))


def directory_id(folder: Path) -> str:
    """Equal on two machines if `folder` is one directory on a file system that both see."""
    status = (folder / CONFIG).stat()
    return f"{status.st_ino}-{status.st_mtime_ns}"


def machine_name(folder: Path) -> str:
    """A name for a directory on this machine. It stays the same when the run resumes."""
    return f"{platform.node()}-{zlib.crc32(str(folder.resolve()).encode()):08x}"


class DirectoryServer:
    """Serves the checkpoints and metrics in `folder` until it is closed.

    Raises LaunchError if the interface `host` cannot be used.
    """

    def __init__(self, folder: Path, host: str, security: Security) -> None:
        self._folder = folder
        self._lock, self._sockets = threading.Lock(), set[socket.socket]()
        refused = Refusals("the server of files")
        self._acceptor = Acceptor(open_listener(host), security, refused, self._serve, rank=_RANK)

    @property
    def address(self) -> Address:
        """Where learners of other machines connect to."""
        return self._acceptor.address

    def close(self) -> None:
        """End all connections."""
        self._acceptor.close()
        with self._lock:
            for each in self._sockets:
                shut_down(each)
        self._acceptor.join()

    def _serve(self, served: socket.socket, hello: Hello) -> None:
        with self._lock:
            self._sockets.add(served)
        try:
            connection = Connection(served, hello)
            while True:
                self._answer(connection, _received_text(connection))
        except (OSError, RefusedError):  # the other end has closed the connection, or does not send what learners send
            pass
        finally:
            with self._lock:
                self._sockets.discard(served)
            served.close()

    def _answer(self, connection: Connection, name: str) -> None:
        try:
            content = self._content(name)
        except OSError as error:
            connection.refuse(f"cannot read '{name}': {error.strerror}")
            return
        connection.send(Header(Kind.STATE, content.nbytes), content)

    def _content(self, name: str) -> Tensor:
        if name == LISTING:
            return _as_tensor(json.dumps(asdict(Listing.of(self._folder))).encode())
        if not _FILES.fullmatch(name):
            raise PermissionError(errno.EACCES, "only checkpoints and metrics are served")
        path = self._folder / name
        size = path.stat().st_size
        return torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


class RemoteDirectory:
    """The directory of another machine. A context; one thread at a time uses it.

    Raises OSError if the machine cannot be reached.
    """

    def __init__(self, address: Address, security: Security) -> None:
        hello = Hello(-1, Purpose.REQUESTS, os.getpid(), bytes(16))
        self._connection = Connection(*handshake.connect(address, hello, _RANK, security))

    def __enter__(self) -> RemoteDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._connection.socket.close()

    def listing(self) -> Listing:
        """What the directory holds."""
        return Listing.from_table(json.loads(bytes(self.read(LISTING))))

    def read(self, name: str) -> memoryview:
        """The content of a file. Raises OSError if there is no such file, or if the machine is lost."""
        content = _as_tensor(name.encode())
        self._connection.send(Header(Kind.STATE, content.nbytes), content)
        try:
            header = self._connection.receive_kind(Kind.STATE)
        except RefusedError as error:
            raise FileNotFoundError(error.reason) from None
        received = torch.empty(header.nbytes, dtype=torch.uint8)
        self._connection.receive_into(received, header)
        return memoryview(received.numpy())  # type: ignore[arg-type]  # NumPy says so from Python 3.12 on


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _received_text(connection: Connection) -> str:
    header = connection.receive_kind(Kind.STATE)
    if not 0 < header.nbytes <= _LONGEST_NAME_BYTES:
        raise HandshakeError(f"the other end sent a name of {header.nbytes} bytes")
    text = torch.empty(header.nbytes, dtype=torch.uint8)
    connection.receive_into(text, header)
    return bytes(text.tolist()).decode(errors="replace")
