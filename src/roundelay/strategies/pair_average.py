"""The weights that exchanges act on at any time: pairwise averaging in difference form, piece by piece."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from roundelay.errors import RefusedError
from roundelay.weights.replica import NON_FINITE, Flat, Layout, all_finite

HALF = 0.5  # w: pairs meet in the middle
PIECE = 2**18  # elements that are exchanged under one lock
BUFFERS = 128  # whose pieces are remembered


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


class _Side(NamedTuple):
    flat: Flat
    pieces: list[Tensor]


class PairAverage:
    r"""$d = s_i - x_j$ once, $x_j \leftarrow x_j + d/2$ there and $x_i \leftarrow x_i - d/2$ here, for any two learners i and j.

    Piece by piece: what is subtracted is still in the cache when it is added, and a step waits for no more than a piece. Halving
    is exact, so both ends add the same numbers, and the sum over learners is conserved even if steps come between two pieces.

    Where the module shows the flat that x is in, x goes on in a second one: each piece of it is read from the first and written
    to the second by the first exchange that changes it, which costs no more than to change it where it is.

    Args:
        flat: x.
        other: the second flat; None if the module never shows the first.
        full_precision: send float32 numbers as they are.

    Attributes:
        lock: guards x.
    """

    def __init__(self, flat: Flat, other: Flat | None = None, *, full_precision: bool) -> None:
        self.full_precision = full_precision
        self.lock = FairLock()
        self._side = _Side(flat, _cut(flat.parts))  # that exchanges write to
        self._other = _Side(other, _cut(other.parts)) if other else None
        self._x = list(self._side.pieces)  # each on the one side or on the other
        self._narrowed = flat.layout.narrowed()
        self._wide = torch.empty(max(map(len, self._x), default=0))  # a piece of what came in half precision
        self._known: dict[tuple[int, int], list[Tensor]] = {}  # pieces of buffers by their addresses and lengths

    @property
    def flat(self) -> Flat:
        """That exchanges write to."""
        return self._side.flat

    def whole(self) -> Flat:
        """All of x in one flat, to be read by who has the lock."""
        if self._other and all(map(operator.is_, self._x, self._other.pieces)):
            return self._other.flat
        for k, (x, here) in enumerate(zip(self._x, self._side.pieces, strict=True)):
            if x is not here:
                self._x[k] = here.copy_(x)
        return self._side.flat

    def for_step(self) -> Flat:
        """All of x in one flat, to be changed by who has the lock; exchanges write there, too."""
        flat = self.whole()
        if self._other and flat is self._other.flat:
            self._side, self._other = self._other, self._side
        self._x = list(self._side.pieces)
        return flat

    def go_on_elsewhere(self) -> None:
        """From now on the flat that exchanges write to must not change: they write to the other one."""
        assert self._other
        self._side, self._other = self._other, self._side

    def tidy(self) -> None:
        """Get the flat that exchanges write to ready to be shown, so that the training thread need not."""
        with self.lock:
            if self._side.flat.shadow:
                self._side.flat.shadow.forget()

    def stay(self) -> None:
        """As it is `for_step`, one flat is enough: it is not to be shown any more."""
        if self._other:
            self._other = None
            self._side.flat.cast(None)

    def pack(self, buffer: Tensor) -> Tensor:
        """What x is now, as it travels: narrowed, if all of it fits. The part of the buffer that was filled."""
        if not self.full_precision:
            packed = buffer[: self._narrowed.nbytes]
            pieces = zip(self._cut_once(packed, self._narrowed), self._x, strict=True)
            if all_finite(s.copy_(x) for s, x in pieces):
                return packed
            self.full_precision = True
        for s, x in zip(self._cut_once(buffer, self.flat.layout), self._x, strict=True):
            s.copy_(x)
        return buffer

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
        differences = zip(self._pieces_of(reply, peer), self._x, strict=True)
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
        for k, (s, d) in enumerate(zip(sent, differences, strict=False)):
            with self.lock:
                x = self._x[k]
                if s is not None:
                    torch.sub(s, x, out=d) if s.dtype == x.dtype else d.copy_(self._as_wide(s).sub_(x))
                wide = d if d.dtype == x.dtype else self._as_wide(d)
                if finite := all_finite([wide]):
                    self._move(k, wide, factor)
            if not finite:
                self._subtract(factor, differences[:k])
                raise RefusedError(peer, NON_FINITE)

    def _subtract(self, factor: float, differences: list[Tensor]) -> None:
        """x <- x - factor d, for the first pieces or all."""
        for k, d in enumerate(differences):
            with self.lock:
                self._move(k, d, -factor)

    def _move(self, k: int, d: Tensor, factor: float) -> None:
        """x <- x + factor d, for one piece, wherever it was."""
        self._x[k] = torch.add(self._x[k], d, alpha=factor, out=self._side.pieces[k])


def _cut(parts: list[Tensor]) -> list[Tensor]:
    return [piece for part in parts for piece in part.split(PIECE)]
