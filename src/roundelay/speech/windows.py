"""Training samples: windows of equal length cut from utterances, none of them across two; or whole utterances.

Utterances lie one after the other in an array of frames; a window is given by rows of that array. The windows of an utterance
tile it; the last one ends where the utterance ends, so that all are full and nothing needs padding. Frames that it shares
with the window before count there only, and those of utterances shorter than a window repeat the last one without counting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Windows:
    """W windows.

    Attributes:
        size: frames of each.
        begin_W, end_W: the rows of its utterance.
        place_W: the first row that counts in it, if it is not shifted.

    >>> windows = windows_of([(0, 10)], size=4)
    >>> rows, counts = windows.rows(np.array([0, 1, 2]))
    >>> rows.tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7], [6, 7, 8, 9]]
    >>> counts[2].tolist()
    [False, False, True, True]
    """

    size: int
    begin_W: Rows
    end_W: Rows
    place_W: Rows

    def __len__(self) -> int:
        return len(self.begin_W)

    def rows(self, which: NDArray[Any], shift: NDArray[Any] | None = None) -> tuple[Rows, NDArray[np.bool_]]:
        """Rows of some windows, B×size, and which of their frames count; all do in windows moved by `shift`."""
        begin_B, end_B, place_B = self.begin_W[which], self.end_W[which], self.place_W[which]
        moved_B = place_B if shift is None else place_B + shift
        start_B = np.maximum(np.minimum(moved_B, end_B - self.size), begin_B)
        rows_BT = start_B[:, None] + np.arange(self.size)
        counts_BT = rows_BT < end_B[:, None]
        if shift is None:
            counts_BT &= rows_BT >= place_B[:, None]
        return np.minimum(rows_BT, end_B[:, None] - 1), counts_BT


@dataclass(frozen=True, eq=False)
class Whole:
    """Utterances as they are; the last row is repeated in those that are shorter than others of their batch.

    >>> rows, counts = windows_of([(0, 3), (3, 5)], size=0).rows(np.array([0, 1]))
    >>> rows.tolist(), counts.sum(axis=1).tolist()
    ([[0, 1, 2], [3, 4, 4]], [3, 2])
    """

    begin_W: Rows
    end_W: Rows

    def __len__(self) -> int:
        return len(self.begin_W)

    def rows(self, which: NDArray[Any], shift: NDArray[Any] | None = None) -> tuple[Rows, NDArray[np.bool_]]:
        """Rows of some utterances, and which of them count; there is nothing to shift."""
        begin_B, end_B = self.begin_W[which], self.end_W[which]
        rows_BT = begin_B[:, None] + np.arange((end_B - begin_B).max(initial=0))
        return np.minimum(rows_BT, end_B[:, None] - 1), rows_BT < end_B[:, None]


def windows_of(utterances: Iterable[tuple[int, int]], size: int) -> Windows | Whole:
    """The windows that tile utterances, each given by its first row and its last + 1; with size 0 they are left whole."""
    spans = np.array([span for span in utterances if span[1] > span[0]], dtype=np.int64).reshape(-1, 2)
    if not size:
        return Whole(spans[:, 0], spans[:, 1])
    tiles = -(-(spans[:, 1] - spans[:, 0]) // size)
    begin_W, end_W = (np.repeat(column, tiles) for column in spans.T)
    number_W = np.arange(len(begin_W)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    return Windows(size, begin_W, end_W, begin_W + size * number_W)
