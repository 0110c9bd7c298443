"""Shared memory between learners of one machine: anonymous files that vanish with their owner, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import torch
from torch import Tensor

from roundelay.errors import HandshakeError

_MAP_FIXED = 0x10
_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_size_t
_map.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class SharedMemory:
    """Buffers of ours that peers may map, and buffers of theirs that we have mapped."""

    def __init__(self) -> None:
        # Address -> (file descriptor, buffer); kept, or another tensor at a freed address would be taken for it.
        self._mine: dict[int, tuple[int, Tensor]] = {}
        # (process, file descriptor) -> which file that was, and all of its bytes
        self._theirs: dict[tuple[int, int], tuple[int, Tensor]] = {}

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

    def map(self, pid: int, fd: int, nbytes: int) -> Tensor:
        """A peer's buffer. Raises OSError where it cannot be mapped, HandshakeError where it has no such bytes."""
        path = f"/proc/{pid}/fd/{fd}"
        file, whole = self._theirs.get((pid, fd), (-1, None))
        if (
            whole is None or whole.nbytes < nbytes or os.stat(path).st_ino != file
        ):  # a number may stand for another file now
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                whole = torch.frombuffer(mmap.mmap(handle, 0), dtype=torch.uint8)
                file = os.fstat(handle).st_ino
            except ValueError:
                raise HandshakeError("the other end says that its weights are in a file which is empty") from None
            finally:
                os.close(handle)
            if whole.nbytes < nbytes:
                raise HandshakeError(f"the other end announced {nbytes} bytes in shared memory of {whole.nbytes}")
            self._theirs[pid, fd] = file, whole
        return whole[:nbytes]

    def forget(self, pid: int) -> None:
        """A peer's process is gone, or its connection: its memory goes with the last tensor on it."""
        for known in list(self._theirs):  # other threads map and forget meanwhile
            if known[0] == pid:
                self._theirs.pop(known, None)

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
        os.close(old)

    def close(self) -> None:
        """Forget everything; memory goes when the last tensor on it does."""
        for fd, _ in self._mine.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._mine.clear()
        self._theirs.clear()


def _anonymous_file(nbytes: int) -> int:
    fd = os.memfd_create("roundelay", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(nbytes, 1))
    return fd


def available() -> bool:
    """Linux only."""
    return hasattr(os, "memfd_create")
