"""Shared memory between learners of one machine: anonymous files that vanish with their owner, however it ends."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from roundelay.errors import HandshakeError

_FD_BITS = 31
_FD = (1 << _FD_BITS) - 1


class SharedMemory:
    """Buffers of ours that peers may map. A buffer needs one file descriptor, from `allocate` to `free`."""

    def __init__(self) -> None:
        # Address -> (place, buffer). Keeping the buffer keeps its address from being used by another tensor.
        self._mine: dict[int, tuple[int, Tensor]] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """A buffer that a peer on this machine can map."""
        fd = os.memfd_create("roundelay", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(nbytes, 1))
        buffer = _mapping(fd)[:nbytes]
        self._mine[buffer.data_ptr()] = (_place(fd), buffer)
        return buffer

    def locate(self, buffer: Tensor) -> int:
        """Where peers find a buffer made by `allocate`; -1 for any other tensor."""
        place, whole = self._mine.get(buffer.data_ptr(), (-1, None))
        return place if whole is not None and whole.nbytes >= buffer.nbytes else -1

    def free(self, buffer: Tensor) -> None:
        """Forget a buffer. Its memory is released when no tensor and no peer uses it any more."""
        place, _ = self._mine.pop(buffer.data_ptr(), (-1, None))
        if place >= 0:
            os.close(place & _FD)

    def close(self) -> None:
        """Forget all buffers. The memory of each is released with the last tensor that uses it."""
        for place, _ in self._mine.values():
            os.close(place & _FD)
        self._mine.clear()


class PeerMemory:
    """Buffers of a peer that we have mapped. A mapping ends with the last tensor that uses it.

    Args:
        pid: the peer's process; None: we map nothing.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._mapped: dict[int, Tensor] = {}  # by place

    def map(self, place: int, nbytes: int) -> Tensor:
        """The peer's buffer, the same tensor each time.

        Raises OSError if it is not there, HandshakeError if another file is there, if it is shorter than announced, or if we
        share no memory.
        """
        if self._pid is None:
            raise HandshakeError("the other end says that its weights are in memory that we do not share")
        buffer = self._mapped.get(place)
        if buffer is None or buffer.nbytes != nbytes:
            buffer = self._mapped[place] = self._map(place, nbytes)
        return buffer

    def _map(self, place: int, nbytes: int) -> Tensor:
        handle = os.open(f"/proc/{self._pid}/fd/{place & _FD}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if place >> _FD_BITS != os.fstat(handle).st_ino & _FD:
                raise HandshakeError("the other end announced shared memory that it has freed")
            whole = _mapping(handle)
        finally:
            os.close(handle)
        if whole.nbytes < nbytes:
            raise HandshakeError(f"the other end announced {nbytes} bytes in shared memory of {whole.nbytes}")
        return whole[:nbytes]


def _place(fd: int) -> int:
    """The file descriptor and the file's inode number.

    A descriptor's number is soon used again. The inode number keeps a peer that was frozen from mapping the wrong file.
    """
    return (os.fstat(fd).st_ino & _FD) << _FD_BITS | fd


def _mapping(fd: int) -> Tensor:
    """All bytes of a file. Unlike `mmap.mmap`, this keeps no file descriptor."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=os.fstat(fd).st_size, dtype=torch.uint8)


def available() -> bool:
    """Whether this system has anonymous files: Linux has."""
    return hasattr(os, "memfd_create")
