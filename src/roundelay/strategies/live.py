"""The weights that exchanges act on at any time: pairwise averaging in difference form, piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import repeat

import torch
from torch import Tensor

from roundelay.errors import RefusedError
from roundelay.replica import NON_FINITE, Flat, Layout, all_finite

HALF = 0.5  # w: pairs meet in the middle
PIECE = 2**18  # elements that are exchanged under one lock
BUFFERS = 64  # whose pieces are remembered


class FairLock:
    """A lock that whoever has waited for it gets before those who come later, even from the one who has just released it."""

    def __init__(self) -> None:
        self._entry, self._lock = threading.Lock(), threading.Lock()

    def acquire(self) -> None:
        """Wait for it, first come, first served."""
        with self._entry:
            self._lock.acquire()

    def release(self) -> None:
        """From any thread."""
        self._lock.release()

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._lock.locked()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


class LiveWeights:
    r"""$d = s_i - x_j$ once, $x_j \leftarrow x_j + d/2$ there and $x_i \leftarrow x_i - d/2$ here, for any two learners i and j.

    Piece by piece: what is subtracted is still in the cache when it is added, and a step waits for no more than a piece. Halving
    is exact, so both ends add the same numbers, and the sum over learners is conserved even if steps come between two pieces.

    Args:
        flat: x.
        full_precision: send float32 numbers as they are.

    Attributes:
        lock: guards x.
    """

    def __init__(self, flat: Flat, *, full_precision: bool) -> None:
        self.flat, self.full_precision = flat, full_precision
        self.lock = FairLock()
        self._pieces = _cut(flat.parts)
        self._narrowed = flat.layout.narrowed()
        self._wide = torch.empty(max(map(len, self._pieces), default=0))  # a piece of what came in half precision
        self._known: dict[tuple[int, int], list[Tensor]] = {}  # pieces of buffers by their addresses and lengths

    def pack(self, buffer: Tensor) -> Tensor:
        """What x is now, as it travels: narrowed, if all of it fits. The part of the buffer that was filled."""
        if not self.full_precision:
            packed = buffer[: self._narrowed.nbytes]
            pieces = zip(self._cut_once(packed, self._narrowed), self._pieces, strict=True)
            if all_finite(s.copy_(x) for s, x in pieces):
                return packed
            self.full_precision = True
        return buffer.copy_(self.flat.storage)

    def answer(self, peer: int, request: Tensor, reply: Tensor) -> None:
        """d = s - x;  x <- x + d/2;  the reply is d.

        Raises RefusedError, with nothing changed, for weights that are not finite or not of this model.
        """
        self._add(HALF, self._pieces_of(reply, peer), peer, self._pieces_of(request, peer))

    def take(self, peer: int, reply: Tensor) -> None:
        """x <- x - d/2, for a reply d. Raises RefusedError, with nothing changed, as `answer` does."""
        self._add(-HALF, self._pieces_of(reply, peer), peer)

    def take_back(self, peer: int, reply: Tensor) -> None:
        """x <- x - d/2, for a reply d of ours that nobody got."""
        self._subtract(HALF, self._pieces_of(reply, peer))

    def norm2(self, peer: int, reply: Tensor) -> float:
        """|d|^2."""
        differences = zip(self._pieces_of(reply, peer), self._pieces, strict=True)
        return sum(float(torch.linalg.vector_norm(d, dtype=x.dtype)) ** 2 for d, x in differences)

    def forget(self) -> None:
        """Let go of the buffers of others: memory of a peer that is gone is not kept."""
        self._known.clear()

    def _pieces_of(self, storage: Tensor, peer: int) -> list[Tensor]:
        """Of weights as a peer has sent them. Raises RefusedError if they are not of this model."""
        layout = self._narrowed if storage.nbytes == self._narrowed.nbytes else self.flat.layout
        if storage.nbytes != layout.nbytes:
            raise RefusedError(peer, "another model")
        return self._cut_once(storage, layout)

    def _cut_once(self, storage: Tensor, layout: Layout) -> list[Tensor]:
        """The pieces of one of the few buffers that there are: cutting it up costs as much as adding a piece.

        Pieces keep their memory, so no other buffer can be at that address.
        """
        place = storage.data_ptr(), storage.nbytes
        pieces = self._known.get(place)
        if pieces is None:
            if len(self._known) >= BUFFERS:
                self.forget()
            pieces = self._known[place] = _cut(layout.parts_of(storage))
        return pieces

    def _as_wide(self, piece: Tensor) -> Tensor:
        return self._wide[: piece.numel()].copy_(piece)

    def _add(
        self, factor: float, differences: list[Tensor], peer: int, sent: Iterable[Tensor | None] = repeat(None)
    ) -> None:
        """x <- x + factor d, where d = s - x first if s was sent. Raises RefusedError if a number is not finite.

        Pieces before that are taken back.
        """
        for done, (s, x, d) in enumerate(zip(sent, self._pieces, differences, strict=False)):
            with self.lock:
                if s is not None:
                    torch.sub(s, x, out=d) if s.dtype == x.dtype else d.copy_(self._as_wide(s).sub_(x))
                wide = d if d.dtype == x.dtype else self._as_wide(d)
                if finite := all_finite([wide]):
                    x.add_(wide, alpha=factor)
            if not finite:
                self._subtract(factor, differences[:done])
                raise RefusedError(peer, NON_FINITE)

    def _subtract(self, factor: float, differences: list[Tensor]) -> None:
        """x <- x - factor d, for the first pieces or all."""
        for x, d in zip(self._pieces, differences, strict=False):
            with self.lock:
                x.sub_(d, alpha=factor)


def _cut(parts: list[Tensor]) -> list[Tensor]:
    return [piece for part in parts for piece in part.split(PIECE)]
