"""Training samples: windows of equal length, each from one utterance; or whole utterances.

The utterances follow each other in one array of frames, and a window is a range of rows of this array. The windows of an
utterance tile it. The last window ends where the utterance ends, so that no window needs padding; frames that it shares with
the window before count only once. In an utterance shorter than a window the last frame is repeated, and the repetitions do not
count.
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
    """W windows of equal length.

    Attributes:
        size: frames of a window.
        begin_W, end_W: first row and last row + 1 of the utterance of each window.
        first_W: the first row of each window that counts, if the window is not shifted.

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
    first_W: Rows

    def __len__(self) -> int:
        return len(self.begin_W)

    def rows(self, which: NDArray[Any], shift: NDArray[Any] | None = None) -> tuple[Rows, NDArray[np.bool_]]:
        """Rows of the windows `which`, B×size, and which of their frames count. With a `shift` all frames of the utterance do."""
        begin_B, end_B, first_B = self.begin_W[which], self.end_W[which], self.first_W[which]
        moved_B = first_B if shift is None else first_B + shift
        start_B = np.maximum(np.minimum(moved_B, end_B - self.size), begin_B)
        rows_BT = start_B[:, None] + np.arange(self.size)
        counts_BT = rows_BT < end_B[:, None]
        if shift is None:
            counts_BT &= rows_BT >= first_B[:, None]
        return np.minimum(rows_BT, end_B[:, None] - 1), counts_BT


@dataclass(frozen=True, eq=False)
class Whole:
    """Whole utterances. In a batch, the last row of shorter utterances is repeated.

    >>> rows, counts = windows_of([(0, 3), (3, 5)], size=0).rows(np.array([0, 1]))
    >>> rows.tolist(), counts.sum(axis=1).tolist()
    ([[0, 1, 2], [3, 4, 4]], [3, 2])
    """

    begin_W: Rows
    end_W: Rows

    def __len__(self) -> int:
        return len(self.begin_W)

    def rows(self, which: NDArray[Any], shift: NDArray[Any] | None = None) -> tuple[Rows, NDArray[np.bool_]]:
        """Rows of the utterances `which`, B×T, and which of them count. `shift` has no effect."""
        begin_B, end_B = self.begin_W[which], self.end_W[which]
        rows_BT = begin_B[:, None] + np.arange((end_B - begin_B).max(initial=0))
        return np.minimum(rows_BT, end_B[:, None] - 1), rows_BT < end_B[:, None]


def windows_of(utterances: Iterable[tuple[int, int]], size: int) -> Windows | Whole:
    """Windows that tile utterances, which are given by first row and last row + 1. With size 0 utterances stay whole."""
    spans = np.array([span for span in utterances if span[1] > span[0]], dtype=np.int64).reshape(-1, 2)
    if not size:
        return Whole(spans[:, 0], spans[:, 1])
    tiles = -(-(spans[:, 1] - spans[:, 0]) // size)
    begin_W, end_W = (np.repeat(column, tiles) for column in spans.T)
    number_W = np.arange(len(begin_W)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    return Windows(size, begin_W, end_W, begin_W + size * number_W)
