"""What is said when: phones or words with their times, in CTM files and as labels of frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from roundelay.speech.cache import DataError

SILENCE = "SIL"
FRAME_SHIFT_S = 0.01
STATES = 3  # of a phone's HMM: its beginning, middle and end

Ints: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True)
class Segments:
    """Symbols in the order of their times.

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
        """When the last one ends."""
        return self.starts_s[-1] + self.durations_s[-1] if self.symbols else 0.0

    def faster(self, speed: float) -> Segments:
        """The same, said `speed` times as fast."""
        return Segments(
            self.symbols,
            tuple(start / speed for start in self.starts_s),
            tuple(duration / speed for duration in self.durations_s),
        )

    def covering(self, duration_s: float, silence: str = SILENCE) -> Segments:
        """The same without gaps: silence before, between and after, where nothing is said for half a frame or more.

        >>> Segments(("AY",), (0.2,), (0.3,)).covering(1.0).symbols
        ('SIL', 'AY', 'SIL')
        """
        full: list[tuple[str, float, float]] = []
        now = 0.0
        for symbol, start, duration in (*self, (silence, duration_s, 0.0)):
            if start - now >= FRAME_SHIFT_S / 2:
                full.append((silence, now, start - now))
                now = start
            if duration > 0:
                full.append((symbol, start, duration))
                now = max(now, start + duration)
        return segments(_merged(full, silence))


def segments(rows: Iterable[tuple[str, float, float]]) -> Segments:
    """Segments from rows of symbol, start and duration."""
    table = list(rows)
    return Segments(tuple(row[0] for row in table), tuple(row[1] for row in table), tuple(row[2] for row in table))


def _merged(rows: Iterable[tuple[str, float, float]], symbol: str) -> list[tuple[str, float, float]]:
    """Neighbouring rows of this symbol made one."""
    merged: list[tuple[str, float, float]] = []
    for row in rows:
        if merged and row[0] == symbol == merged[-1][0]:
            start = merged[-1][1]
            merged[-1] = (symbol, start, row[1] + row[2] - start)
        else:
            merged.append(row)
    return merged


@dataclass(frozen=True)
class FrameLabels:
    """For each frame: the number of the segment it lies in, that segment's phone, and the third of the phone (0, 1, 2).

    Neighbouring phones, for context-dependent states, are `phones_S[segment ± 1]`.
    """

    segment_T: Ints
    phone_T: Ints
    third_T: Ints
    phones_S: Ints


def frame_labels(alignment: Segments, frames: int, phone_ids: Mapping[str, int], silence: str = SILENCE) -> FrameLabels:
    """Labels of 10 ms frames from phone times; what is not covered is silence.

    Frame t belongs to the segment at (t + ½) · 10 ms: aligners that work on frames, as Kaldi's and Sphinx's do, write
    10 ms · t into a CTM for a phone that begins with frame t. A phone of n frames gives its i-th to third ⌊3(i + ½)/n⌋,
    so that one of a single frame is all middle. Phones too short to own a frame own none.

    >>> labels = frame_labels(Segments(("AY",), (0.02,), (0.03,)), 6, {"SIL": 0, "AY": 1})
    >>> labels.phone_T.tolist(), labels.third_T.tolist()
    ([0, 0, 1, 1, 1, 0], [0, 2, 0, 1, 2, 1])
    """
    full = alignment.covering(frames * FRAME_SHIFT_S, silence)
    try:
        phones_S = np.array([phone_ids[symbol] for symbol in full.symbols], dtype=np.int32)
    except KeyError as error:
        raise DataError(f"the alignment has a phone {error} that the phone set lacks") from error
    # Times are decimal fractions: a thousandth of a frame keeps 0.29 / 0.01 = 28.999… at 29.
    starts = np.round(np.array(full.starts_s) / FRAME_SHIFT_S, 3)
    middles = np.arange(frames) + 0.5
    segment_T = np.clip(np.searchsorted(starts, middles, side="right") - 1, 0, len(full) - 1).astype(np.int32)
    first_S = np.searchsorted(segment_T, np.arange(len(full)))
    count_S = np.bincount(segment_T, minlength=len(full))
    place = np.arange(frames) - first_S[segment_T]
    third_T = (STATES * (2 * place + 1) // (2 * count_S[segment_T])).astype(np.int32)
    return FrameLabels(segment_T, phones_S[segment_T], third_T, phones_S)


def read_ctm(path: Path) -> dict[str, Segments]:
    """The segments of each utterance of a CTM: utterance, channel, start, duration, symbol, and whatever follows."""
    rows: dict[str, list[tuple[str, float, float]]] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith(("#", ";;")):
                continue
            fields = line.split()
            try:
                utterance, _, start, duration, symbol = fields[:5]
                rows.setdefault(utterance, []).append((symbol, float(start), float(duration)))
            except ValueError as error:
                raise DataError(f"{path}:{number} is no line of a CTM: '{line.strip()}'") from error
    return {name: segments(sorted(table, key=lambda row: row[1])) for name, table in rows.items()}


def write_ctm(path: Path, alignments: Mapping[str, Segments]) -> None:
    """Write the segments of each utterance as a CTM; times in tenths of milliseconds."""
    with path.open("w", encoding="utf-8") as out:
        for name, alignment in alignments.items():
            out.writelines(f"{name} 1 {start:.4f} {length:.4f} {symbol}\n" for symbol, start, length in alignment)
