"""Flat buffers: all weights of a model in one piece of memory, as they travel between learners."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

NON_FINITE = "non-finite weights"  # why such weights are refused
PIECE = 2**18  # elements that are exchanged at a time
ALIGNMENT = 64  # bytes: a cache line, and enough for every dtype

Allocate = Callable[[int], Tensor]


class Layout:
    """Where the numbers of each dtype are in a buffer of bytes: one part per dtype, each aligned.

    Args:
        counts: how many numbers of each dtype, in this order.

    Attributes:
        nbytes: length of the buffer.
    """

    def __init__(self, counts: Mapping[torch.dtype, int]) -> None:
        self._counts = dict(counts)
        self._spans: list[tuple[int, int, torch.dtype]] = []
        self.nbytes = 0
        for dtype, count in self._counts.items():
            end = self.nbytes + count * dtype.itemsize
            self._spans.append((self.nbytes, end, dtype))
            self.nbytes = -(-end // ALIGNMENT) * ALIGNMENT
        # A process may hold no row of a sharded model, but empty memory cannot be shared.
        self.nbytes = max(self.nbytes, ALIGNMENT)

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Layout:
        """The layout of a copy of these tensors.

        >>> Layout.of([torch.ones(2, 3), torch.ones(10)]).nbytes
        64
        """
        counts: dict[torch.dtype, int] = {}
        for tensor in tensors:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
        return cls(counts)

    @property
    def code(self) -> int:
        """A number that tells layouts apart (a CRC); never zero."""
        return zlib.crc32(repr(self._spans).encode()) or 1

    def parts_of(self, storage: Tensor) -> list[Tensor]:
        """One flat view per dtype onto a buffer of this layout."""
        return [storage[start:end].view(dtype) for start, end, dtype in self._spans]

    def pieces_of(self, storage: Tensor) -> list[Tensor]:
        """The parts of a buffer of this layout, cut into pieces of at most `PIECE` numbers."""
        return [piece for part in self.parts_of(storage) for piece in part.split(PIECE)]

    def narrowed(self, wire: torch.dtype) -> Layout:
        """The same numbers, with float32 stored as the shorter dtype `wire`.

        Returns this layout itself if that saves nothing, so that the two can be told apart by their length.

        >>> Layout({torch.float32: 1000}).nbytes, Layout({torch.float32: 1000}).narrowed(torch.bfloat16).nbytes
        (4032, 2048)
        """
        if wire in self._counts or torch.float32 not in self._counts:
            return self
        narrowed = Layout({wire if dtype == torch.float32 else dtype: n for dtype, n in self._counts.items()})
        return narrowed if narrowed.nbytes < self.nbytes else self


class Flat:
    """One contiguous buffer with room for a list of tensors, grouped by dtype; zero at first.

    Args:
        tensors: give the shapes and dtypes; their values are not copied.
        allocate: makes the buffer, from its length in bytes; plain host memory by default.
        on: the device, if `allocate` is not given.

    Attributes:
        layout: of the storage.
        storage: all bytes (uint8), as they travel.
        parts: one flat view per dtype, for arithmetic.
        pieces: the parts, cut into pieces of at most `PIECE` numbers.
        views: one view per tensor, in the order given, for copying.
    """

    def __init__(
        self, tensors: Sequence[Tensor], allocate: Allocate | None = None, on: torch.device | str = "cpu"
    ) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        self.layout = Layout.of(tensors)
        nbytes = self.layout.nbytes
        self.storage = allocate(nbytes) if allocate else torch.empty(nbytes, dtype=torch.uint8, device=on)
        self.storage.zero_()
        self.parts = self.layout.parts_of(self.storage)
        self.pieces = self.layout.pieces_of(self.storage)
        views: dict[int, Tensor] = {}
        for part, indices in zip(self.parts, by_dtype.values(), strict=True):
            pieces = part.split([tensors[i].numel() for i in indices])
            views.update({i: piece.view(tensors[i].shape) for i, piece in zip(indices, pieces, strict=True)})
        self.views = [views[index] for index in range(len(tensors))]

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into this buffer."""
        torch._foreach_copy_(self.views, list(tensors))

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copy this buffer into the tensors, which must be detached."""
        torch._foreach_copy_(list(tensors), self.views)


def all_finite(parts: Iterable[Tensor]) -> bool:
    """Whether no number is NaN or infinite; one pass, because either of them would show in the sum.

    >>> all_finite([torch.ones(3), torch.tensor([1.0, float("inf")])])
    False
    """
    for part in parts:
        total = part.sum(dtype=torch.float32 if part.dtype.itemsize < 4 else None)
        # Finite numbers may have an infinite sum.
        if not math.isfinite(float(total)) and not torch.isfinite(part).all():
            return False
    return True
