"""Shared memory between learners of one machine: anonymous files that vanish with their owner, however it ends."""

from __future__ import annotations

import contextlib
import mmap
import os

import torch
from torch import Tensor

from roundelay.errors import HandshakeError


class SharedMemory:
    """Buffers of ours that peers may map.

    Until `close`, no file descriptor is reused for another buffer, so a peer that has mapped it need not check again.
    """

    def __init__(self) -> None:
        # Address -> (file descriptor, buffer). Keeping the buffer keeps its address from being used by another tensor.
        self._mine: dict[int, tuple[int, Tensor]] = {}
        # File descriptors of freed buffers. They stay open, so that their numbers are not used again.
        self._reserved: list[int] = []

    def allocate(self, nbytes: int) -> Tensor:
        """A buffer that a peer on this machine can map."""
        fd = os.memfd_create("roundelay", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(nbytes, 1))
        buffer = torch.frombuffer(mmap.mmap(fd, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
        self._mine[buffer.data_ptr()] = (fd, buffer)
        return buffer

    def locate(self, buffer: Tensor) -> int:
        """The file descriptor of a buffer made by `allocate`, -1 for any other tensor."""
        fd, whole = self._mine.get(buffer.data_ptr(), (-1, None))
        return fd if whole is not None and whole.nbytes >= buffer.nbytes else -1

    def free(self, buffer: Tensor) -> None:
        """Forget a buffer. Its memory is released when no tensor and no peer uses it any more."""
        fd, _ = self._mine.pop(buffer.data_ptr(), (-1, None))
        if fd >= 0:
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), fd, inheritable=False)
            self._reserved.append(fd)

    def close(self) -> None:
        """Forget all buffers. The memory of each is released with the last tensor that uses it."""
        for fd in (*self._reserved, *(fd for fd, _ in self._mine.values())):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._reserved.clear()
        self._mine.clear()


class PeerMemory:
    """Buffers of a peer that we have mapped. A mapping ends with the last tensor that uses it.

    Args:
        pid: the peer's process, which keeps its `SharedMemory` at least as long as this is used; None: we map nothing.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._mapped: dict[int, Tensor] = {}  # by file descriptor

    def map(self, fd: int, nbytes: int) -> Tensor:
        """The peer's buffer, the same tensor each time.

        Raises OSError if it cannot be mapped, HandshakeError if it is shorter than announced or we share no memory.
        """
        if self._pid is None:
            raise HandshakeError("the other end says that its weights are in memory that we do not share")
        buffer = self._mapped.get(fd)
        if buffer is None or buffer.nbytes != nbytes:
            buffer = self._mapped[fd] = self._map(fd, nbytes)
        return buffer

    def _map(self, fd: int, nbytes: int) -> Tensor:
        handle = os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            whole = torch.frombuffer(mmap.mmap(handle, 0), dtype=torch.uint8)
        except ValueError:
            raise HandshakeError("the other end announced shared memory that is empty") from None
        finally:
            os.close(handle)
        if whole.nbytes < nbytes:
            raise HandshakeError(f"the other end announced {nbytes} bytes in shared memory of {whole.nbytes}")
        return whole[:nbytes]


def available() -> bool:
    """Whether this system has anonymous files: Linux has."""
    return hasattr(os, "memfd_create")
