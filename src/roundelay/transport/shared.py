"""Shared memory between learners of one machine: anonymous files that vanish with their owner, however it ends."""

from __future__ import annotations

import contextlib
import mmap
import os

import torch
from torch import Tensor


class SharedMemory:
    """Buffers of ours that peers may map, and buffers of theirs that we have mapped."""

    def __init__(self) -> None:
        # Address -> (file descriptor, buffer); kept, or another tensor at a freed address would be taken for it.
        self._mine: dict[int, tuple[int, Tensor]] = {}
        self._theirs: dict[tuple[int, int], Tensor] = {}  # (process, file descriptor) -> all of its bytes

    def allocate(self, nbytes: int) -> Tensor:
        """A buffer of our own that a peer on this machine can map."""
        fd = os.memfd_create("roundelay", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(nbytes, 1))
        buffer = torch.frombuffer(mmap.mmap(fd, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
        self._mine[buffer.data_ptr()] = (fd, buffer)
        return buffer

    def locate(self, buffer: Tensor) -> tuple[int, int] | None:
        """(file descriptor, offset) of a buffer made by `allocate`, None for any other."""
        found = self._mine.get(buffer.data_ptr())
        return None if found is None or found[1].nbytes < buffer.nbytes else (found[0], 0)

    def map(self, pid: int, fd: int, offset: int, nbytes: int) -> Tensor:
        """A peer's buffer. Raises OSError where it cannot be opened."""
        whole = self._theirs.get((pid, fd))
        if whole is None or whole.nbytes < offset + nbytes:
            handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                whole = torch.frombuffer(mmap.mmap(handle, 0), dtype=torch.uint8)
            finally:
                os.close(handle)
            self._theirs[pid, fd] = whole
        return whole[offset : offset + nbytes]

    def close(self) -> None:
        """Forget everything; memory goes when the last tensor on it does."""
        for fd, _ in self._mine.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._mine.clear()
        self._theirs.clear()


def available() -> bool:
    """Linux only."""
    return hasattr(os, "memfd_create")
