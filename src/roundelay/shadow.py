"""Memory that is there twice: as it is, and as a shadow in which whoever writes changes only the shadow."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_PAGEMAP = "/proc/self/pagemap"  # of 64 bits a page: is it there, is it swapped out, does it belong to a file
_THERE, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))

_libc = ctypes.CDLL(None, use_errno=True)

no_fork = threading.RLock()  # who has it is alone in changing shadows, and no process is forked meanwhile


class Shadow:
    """Shows what is in an anonymous file, without a copy; what is written here stays here, until it is forgotten.

    The kernel copies a page when it is written to for the first time (MAP_PRIVATE). Linux only.

    Raises OSError where the kernel copies all of it at once (after mlockall), or does not tell which pages it has copied.

    Args:
        fd: of the file.
        nbytes: of its beginning that are shown.

    Attributes:
        writes: how many times in a row something was found to be forgotten.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._memory = mmap.mmap(fd, max(nbytes, 1), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._first_page = self._bytes.data_ptr() // mmap.PAGESIZE
        self._entries = bytearray(8 * -(-len(self._memory) // mmap.PAGESIZE))
        self._pages = np.frombuffer(self._entries, np.uint64)
        self._is_copy, self._may_be_written = False, False
        self.writes = 0
        self._check(fd)
        self._pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)

    def _check(self, fd: int) -> None:
        """Whether it follows the file: one byte of that is changed for a moment."""
        before = int(self._bytes[0])
        os.pwrite(fd, bytes([before ^ 1]), 0)
        follows = int(self._bytes[0]) == before ^ 1
        os.pwrite(fd, bytes([before]), 0)
        if not follows:
            raise OSError("a private mapping does not follow its file: is memory locked?")

    def views(self, places: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Tensors like those given, each at an offset in bytes; each has a storage of its own, as tensors usually do."""
        return [self._view(offset, like) if like.numel() else torch.empty_like(like) for offset, like in places]

    def _view(self, offset: int, like: Tensor) -> Tensor:
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
        # Not flat.view(): that would keep `flat`, a second user of the storage.
        return torch.empty(0, dtype=like.dtype).set_(flat.untyped_storage(), 0, like.shape, like.stride())

    def expose(self) -> None:
        """From now on, until what was written is forgotten, somebody may write here."""
        self._may_be_written = True
        _exposed.add(self)

    def forget(self) -> None:
        """Forget what was written here: show what is in the file."""
        with no_fork:
            if self._may_be_written:
                self.writes = self.writes + 1 if self._is_written() else 0
                if self.writes:
                    self._drop_pages()
            self._may_be_written = self._is_copy = False
            _exposed.discard(self)

    def _drop_pages(self) -> None:
        if _libc.madvise(
            ctypes.c_void_p(self._bytes.data_ptr()), ctypes.c_size_t(len(self._memory)), mmap.MADV_DONTNEED
        ):
            raise OSError(ctypes.get_errno(), "cannot forget what was written to weights: is memory locked?")

    def _is_written(self) -> bool:
        """Whether a page is not the file's any more. Ten times as fast as to forget, and then to find all pages again."""
        if os.preadv(self._pagemap, [self._entries], 8 * self._first_page) < len(self._entries):
            return True
        if np.bitwise_and.reduce(self._pages) & _OF_FILE:
            return False
        exists, is_of_file = self._pages & (_THERE | _SWAPPED) != 0, self._pages & _OF_FILE != 0
        return bool((exists & ~is_of_file).any())

    def keep(self) -> None:
        """Be a copy of what is there now, whatever becomes of the file, until that is forgotten."""
        with no_fork:
            if not self._is_copy:
                self._may_be_written = self._is_copy = True
                first_of_each_page = self._bytes[:: mmap.PAGESIZE]
                first_of_each_page.copy_(first_of_each_page.clone())

    def __del__(self) -> None:
        if hasattr(self, "_pagemap"):
            os.close(self._pagemap)


_exposed: weakref.WeakSet[Shadow] = weakref.WeakSet()


def _before_fork() -> None:
    """The child is to have the weights of now, where it would see the file change."""
    no_fork.acquire()
    for shadow in list(_exposed):
        shadow.keep()


os.register_at_fork(before=_before_fork, after_in_parent=no_fork.release, after_in_child=no_fork.release)
