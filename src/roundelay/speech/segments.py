"""Phones or words with their times, and CTM files that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import DataError
from roundelay.speech.text_files import lines_of

FRAME_SHIFT_S = 0.01

Ints: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True)
class Segments:
    """Phones or words with start and duration, sorted by start.

    >>> Segments(("S", "IH", "K", "S"), (0.0, 0.1, 0.15, 0.3), (0.1, 0.05, 0.1, 0.1)).end_s
    0.4
    """

    symbols: tuple[str, ...]
    starts_s: tuple[float, ...]
    durations_s: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.symbols)

    def __iter__(self) -> Iterator[tuple[str, float, float]]:
        return zip(self.symbols, self.starts_s, self.durations_s, strict=True)

    @property
    def end_s(self) -> float:
        """End of the last segment."""
        return self.starts_s[-1] + self.durations_s[-1] if self.symbols else 0.0

    def faster(self, speed: float) -> Segments:
        """A copy whose times are divided by `speed`."""
        return Segments(
            self.symbols,
            tuple(start / speed for start in self.starts_s),
            tuple(duration / speed for duration in self.durations_s),
        )


def segments(rows: Iterable[tuple[str, float, float]]) -> Segments:
    """Segments from rows of symbol, start and duration."""
    table = list(rows)
    return Segments(tuple(row[0] for row in table), tuple(row[1] for row in table), tuple(row[2] for row in table))


def read_ctm(path: Path) -> dict[str, Segments]:
    """The segments of each utterance in a CTM file. Columns: utterance, channel, start, duration, symbol; others are ignored."""
    rows: dict[str, list[tuple[str, float, float]]] = {}
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip() or line.startswith(("#", ";;")):
            continue
        try:
            utterance, _, start, duration, symbol = line.split()[:5]
            rows.setdefault(utterance, []).append((symbol, float(start), float(duration)))
        except ValueError as error:
            raise DataError(f"{path}:{number} is not a line of a CTM file: '{line.strip()}'") from error
    return {name: segments(sorted(table, key=lambda row: row[1])) for name, table in rows.items()}


def write_ctm(
    path: Path, alignments: Mapping[str, Segments], confidences: Mapping[str, Sequence[float]] | None = None
) -> None:
    """Write the segments of each utterance as a CTM file, with the confidence of each segment in the last column if given.

    Starts and ends are rounded to 0.1 ms, and durations follow from them, so that rounding makes no gaps.
    """
    with path.open("w", encoding="utf-8") as out:
        for name, alignment in alignments.items():
            sure = [f" {each:.4f}" for each in confidences[name]] if confidences else [""] * len(alignment)
            for (symbol, start, duration), confidence in zip(alignment, sure, strict=True):
                length = round(start + duration, 4) - round(start, 4)
                out.write(f"{name} 1 {start:.4f} {length:.4f} {symbol}{confidence}\n")
