"""Shared memory between learners of one machine: anonymous files that vanish with their owner, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import NamedTuple

import torch
from torch import Tensor

from roundelay.errors import HandshakeError
from roundelay.shadow import Shadow

_MAP_FIXED = 0x10
_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_size_t
_map.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Location(NamedTuple):
    """Where numbers are in memory that is shared: in which file, how far from its beginning, and the length of all of it."""

    fd: int
    offset: int
    nbytes: int


class SharedMemory:
    """Buffers of ours that peers may map.

    A file descriptor stands for one file as long as this lives: who has mapped it need not look again.
    """

    def __init__(self) -> None:
        # Address -> (file descriptor, buffer); kept, or another tensor at a freed address would be taken for it.
        self._mine: dict[int, tuple[int, Tensor]] = {}
        self._withdrawn: list[int] = []  # file descriptors that stand for nothing

    def allocate(self, nbytes: int) -> Tensor:
        """A buffer of our own that a peer on this machine can map."""
        fd = _anonymous_file(nbytes)
        buffer = torch.frombuffer(mmap.mmap(fd, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
        self._mine[buffer.data_ptr()] = (fd, buffer)
        return buffer

    def locate(self, buffer: Tensor) -> int:
        """The file descriptor of a buffer made by `allocate`, -1 for any other."""
        fd, whole = self._mine.get(buffer.data_ptr(), (-1, None))
        return fd if whole is not None and whole.nbytes >= buffer.nbytes else -1

    def shadow(self, buffer: Tensor) -> Shadow | None:
        """Of a buffer made by `allocate`, as long as it is not withdrawn; None for any other, and where that cannot be."""
        fd = self.locate(buffer)
        with contextlib.suppress(OSError):
            return Shadow(fd, buffer.nbytes) if fd >= 0 else None
        return None

    def location(self, values: Tensor) -> Location | None:
        """Of numbers that lie together in a buffer made by `allocate`; None for any other."""
        first, end = values.data_ptr(), values.data_ptr() + values.nbytes
        for start, (fd, buffer) in self._mine.items():
            if start <= first and end <= start + buffer.nbytes and values.is_contiguous():
                return Location(fd, first - start, buffer.nbytes)
        return None

    def withdraw(self, buffer: Tensor) -> None:
        """Put other memory under `buffer`, with undefined content: a peer that has it mapped writes to what nobody reads.

        For a call that has failed while its peer, frozen perhaps, may still be about to answer.
        """
        address = buffer.data_ptr()
        old, whole = self._mine[address]
        fd = _anonymous_file(whole.nbytes)
        if (
            _map(address, max(whole.nbytes, 1), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
            != address
        ):
            raise OSError(ctypes.get_errno(), "cannot map new memory under a buffer")
        self._mine[address] = (fd, whole)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), old, inheritable=False)
        self._withdrawn.append(old)

    def close(self) -> None:
        """Forget everything; memory goes when the last tensor on it does."""
        for fd in (*self._withdrawn, *(fd for fd, _ in self._mine.values())):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._withdrawn.clear()
        self._mine.clear()


class PeerMemory:
    """Buffers of a peer's that we have mapped; they go with the last tensor on them.

    Args:
        pid: the peer's process, which keeps its `SharedMemory` at least as long as this is used.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: dict[int, Tensor] = {}  # by file descriptor

    def map(self, fd: int, nbytes: int) -> Tensor:
        """A buffer, the same tensor each time. Raises OSError where it cannot be mapped, HandshakeError where it is shorter."""
        buffer = self._mapped.get(fd)
        if buffer is None or buffer.nbytes != nbytes:
            buffer = self._mapped[fd] = self._map(fd, nbytes)
        return buffer

    def _map(self, fd: int, nbytes: int) -> Tensor:
        handle = os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            whole = torch.frombuffer(mmap.mmap(handle, 0), dtype=torch.uint8)
        except ValueError:
            raise HandshakeError("the other end says that its weights are in a file which is empty") from None
        finally:
            os.close(handle)
        if whole.nbytes < nbytes:
            raise HandshakeError(f"the other end announced {nbytes} bytes in shared memory of {whole.nbytes}")
        return whole[:nbytes]


def _anonymous_file(nbytes: int) -> int:
    fd = os.memfd_create("roundelay", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(nbytes, 1))
    return fd


def available() -> bool:
    """Linux only."""
    return hasattr(os, "memfd_create")
