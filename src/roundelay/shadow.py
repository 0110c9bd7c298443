"""Memory that is there twice: as it is, and as a shadow in which whoever writes changes only the shadow."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_PAGEMAP = "/proc/self/pagemap"  # of 64 bits a page: is it there, is it swapped out, does it belong to a file
_THERE, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))

_libc = ctypes.CDLL(None, use_errno=True)


class Shadow:
    """Shows what is in an anonymous file, without a copy; what is written here stays here, until it is forgotten.

    The kernel copies a page when it is written to for the first time (MAP_PRIVATE). Linux only.

    Args:
        fd: of the file.
        nbytes: of its beginning that are shown.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._memory = mmap.mmap(fd, max(nbytes, 1), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._first_page = self._bytes.data_ptr() // mmap.PAGESIZE
        self._entries = bytearray(8 * -(-len(self._memory) // mmap.PAGESIZE))
        self._pages = np.frombuffer(self._entries, np.uint64)
        self._is_copy, self._may_be_written = False, False
        try:
            self._pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._pagemap = -1

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

    def forget(self) -> None:
        """Forget what was written here: show what is in the file."""
        if self._may_be_written and self._is_written():
            _libc.madvise(
                ctypes.c_void_p(self._bytes.data_ptr()), ctypes.c_size_t(len(self._memory)), mmap.MADV_DONTNEED
            )
        self._may_be_written = self._is_copy = False

    def _is_written(self) -> bool:
        """Whether a page is not the file's any more. Ten times as fast as to forget, and then to find all pages again."""
        if self._pagemap < 0:
            return True
        os.preadv(self._pagemap, [self._entries], 8 * self._first_page)
        if np.bitwise_and.reduce(self._pages) & _OF_FILE:
            return False
        exists, is_of_file = self._pages & (_THERE | _SWAPPED) != 0, self._pages & _OF_FILE != 0
        return bool((exists & ~is_of_file).any())

    def keep(self) -> None:
        """Be a copy of what is there now, whatever becomes of the file, until that is forgotten."""
        if not self._is_copy:
            self._may_be_written = True
            first_of_each_page = self._bytes[:: mmap.PAGESIZE]
            first_of_each_page.copy_(first_of_each_page.clone())
            self._is_copy = True

    def __del__(self) -> None:
        if getattr(self, "_pagemap", -1) >= 0:
            os.close(self._pagemap)
