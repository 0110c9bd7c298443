"""The two ends of one exchange of live weights, piece by piece."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from roundelay.errors import RefusedError
from roundelay.weights.flat import NON_FINITE, Layout

if TYPE_CHECKING:
    from roundelay.strategies.pair_average import PairAverage

# w: each end moves a third of the way. In lockstep every learner of a ring calls its successor while its predecessor calls it:
# then w = 1/2 gives x_i <- (x_{i-1} + x_{i+1}) / 2, which never converges on an even ring (eigenvalue -1), and w = 1/3 gives the
# papers' own matrix (1/3, 1/3, 1/3). A lone pair loses 4w(1-w) of its squared distance: 0.89 instead of 1.
WEIGHT = 1 / 3


class _End:
    """One end of an exchange: x <- x + rate d. A context: if its block raises, all pieces so far are taken back.

    Args:
        live: the weights x.
        peer: the other end.
        layout: of what travels.
        differences: a buffer of that layout, which holds d in the end.

    Attributes:
        pieces: of the buffer, as bytes.
        nbytes: length of the buffer.
        distance2: |d|^2, so far.
    """

    rate: float

    def __init__(self, live: PairAverage, peer: int, layout: Layout, differences: Tensor) -> None:
        self._live, self._peer = live, peer
        self._x, self._d = live.flat.pieces, layout.pieces_of(differences)
        self._applied = 0
        self.pieces = [d.view(torch.uint8) for d in self._d]
        self.nbytes = layout.nbytes
        self.distance2 = 0.0

    def prepare(self, k: int) -> None:
        """Only the calling end has something to prepare."""

    def apply(self, k: int) -> None:
        """x <- x + rate d, for piece k. Raises RefusedError, with that piece of x unchanged, if a number is not finite."""
        with self._live.readable():
            x, d = self._x[k], self._difference(k)
            wide = self._live.widened(d, x)
            norm = _norm(wide)
            if not _is_finite(wide, norm):
                raise RefusedError(self._peer, NON_FINITE)
            x.add_(wide, alpha=self.rate)
            self._live.replica.correct(k, d, self.rate)
        self.distance2 += norm**2
        self._applied = k + 1
        if self._applied == len(self._d):  # after this, the caller may use its buffer again
            self._live.replica.wait_until_corrected()

    def _difference(self, k: int) -> Tensor:
        return self._d[k]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._take_back()

    def _take_back(self) -> None:
        for k in range(self._applied):
            with self._live.readable():
                self._x[k].add_(self._live.widened(self._d[k], self._x[k]), alpha=-self.rate)
                self._live.replica.correct(k, self._d[k], -self.rate)
        self._live.replica.wait_until_corrected()


class CallingEnd(_End):
    """The end that asks: sends its weights, x <- x - w d.

    Args:
        packs: copy x to the buffer, to be sent. Otherwise the peer reads x in place.
    """

    rate = -WEIGHT

    def __init__(self, live: PairAverage, peer: int, layout: Layout, differences: Tensor, *, packs: bool) -> None:
        super().__init__(live, peer, layout, differences)
        self._packs = packs

    def prepare(self, k: int) -> None:
        """Piece k <- x as it travels. x is read without the lock: s need not be of one instant."""
        self._live.replica.wait_until_readable()
        if self._packs:
            self._d[k].copy_(self._x[k])


class AnsweringEnd(_End):
    """The end that is asked: d = s - x, x <- x + w d.

    Args:
        sent: s, in the buffer of the differences or in another one.
    """

    rate = WEIGHT

    def __init__(self, live: PairAverage, peer: int, layout: Layout, differences: Tensor, sent: Tensor) -> None:
        super().__init__(live, peer, layout, differences)
        self._s = layout.pieces_of(sent)

    def _difference(self, k: int) -> Tensor:
        s, d, x = self._s[k], self._d[k], self._x[k]
        if s.dtype == x.dtype:
            return torch.sub(s, x, out=d)
        return d.copy_(self._live.widened(s, x).sub_(x))


def _norm(d: Tensor) -> float:
    return float(torch.linalg.vector_norm(d, dtype=torch.promote_types(d.dtype, torch.float32)))


def _is_finite(d: Tensor, norm: float) -> bool:
    """Whether all numbers are finite. Only if their norm is not, each of them is looked at: it may be too large itself."""
    return math.isfinite(norm) or bool(torch.isfinite(d).all())
