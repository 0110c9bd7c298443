"""The two ends of one exchange of live weights, piece by piece."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from roundelay.errors import RefusedError
from roundelay.weights import all_finite
from roundelay.weights.flat import NON_FINITE, Layout

if TYPE_CHECKING:
    from roundelay.strategies.pair_average import PairAverage

# w: each end moves a third of the way. In lockstep every learner of a ring calls its successor while its predecessor calls it:
# then w = 1/2 gives x_i <- (x_{i-1} + x_{i+1}) / 2, which never converges on an even ring (eigenvalue -1), and w = 1/3 gives the
# papers' own matrix (1/3, 1/3, 1/3). A lone pair loses 4w(1-w) of its squared distance: 0.89 instead of 1.
WEIGHT = 1 / 3


class _End:
    """One end of an exchange: x <- x + sign c. A context: if its block raises, all pieces so far are taken back.

    Args:
        live: the weights x.
        peer: the other end.
        layout: of what travels.
        corrections: a buffer of that layout, which holds c in the end.

    Attributes:
        pieces: of the buffer, as bytes.
        nbytes: length of the buffer.
    """

    sign: float

    def __init__(self, live: PairAverage, peer: int, layout: Layout, corrections: Tensor) -> None:
        self._live, self._peer = live, peer
        self._x, self._c = live.flat.pieces, layout.pieces_of(corrections)
        self._applied = 0
        self.pieces = [c.view(torch.uint8) for c in self._c]
        self.nbytes = layout.nbytes

    def prepare(self, k: int) -> None:
        """Only the calling end has something to prepare."""

    def apply(self, k: int) -> None:
        """x <- x + sign c, for piece k. Raises RefusedError, with that piece of x unchanged, if a number is not finite."""
        with self._live.readable():
            x, c = self._x[k], self._correction(k)
            wide = self._live.widened(c, x)
            if not all_finite([wide]):
                raise RefusedError(self._peer, NON_FINITE)
            x.add_(wide, alpha=self.sign)
            self._live.replica.correct(k, c, self.sign)
        self._applied = k + 1
        if self._applied == len(self._c):  # after this, the caller may use its buffer again
            self._live.replica.wait_until_corrected()

    def _correction(self, k: int) -> Tensor:
        return self._c[k]

    def norm2(self) -> float:
        """|s - x|^2 = |c|^2 / w^2."""
        corrections = zip(self._c, self._x, strict=True)
        return sum(float(torch.linalg.vector_norm(c, dtype=x.dtype)) ** 2 for c, x in corrections) / WEIGHT**2

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
                self._x[k].add_(self._c[k], alpha=-self.sign)
                self._live.replica.correct(k, self._c[k], -self.sign)
        self._live.replica.wait_until_corrected()


class CallingEnd(_End):
    """The end that asks: sends its weights, x <- x - c.

    Args:
        packs: copy x to the buffer, to be sent. Otherwise the peer reads x in place.
    """

    sign = -1.0

    def __init__(self, live: PairAverage, peer: int, layout: Layout, corrections: Tensor, *, packs: bool) -> None:
        super().__init__(live, peer, layout, corrections)
        self._packs = packs

    def prepare(self, k: int) -> None:
        """Piece k <- x as it travels. x is read without the lock: s need not be of one instant."""
        self._live.replica.wait_until_readable()
        if self._packs:
            self._c[k].copy_(self._x[k])


class AnsweringEnd(_End):
    """The end that is asked: c = w (s - x), x <- x + c.

    Args:
        sent: s, in the buffer of the corrections or in another one.
    """

    sign = 1.0

    def __init__(self, live: PairAverage, peer: int, layout: Layout, corrections: Tensor, sent: Tensor) -> None:
        super().__init__(live, peer, layout, corrections)
        self._s = layout.pieces_of(sent)

    def _correction(self, k: int) -> Tensor:
        s, c, x = self._s[k], self._c[k], self._x[k]
        if s.dtype == x.dtype:
            return torch.sub(s, x, out=c).mul_(WEIGHT)
        return c.copy_(self._live.widened(s, x).sub_(x).mul_(WEIGHT))
