"""Numbers over time: what one learner, or the evaluations of one split, told one after the other."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

MOST_POINTS = 240  # of a curve: more than a chart has room for


class Track:
    """Columns of numbers, one entry a row; what a row lacks is NaN.

    A run that was resumed from a checkpoint tells again what it had told after that checkpoint: a row whose `samples_seen` lies
    before the last one's takes back the rows after it, and where its clock began anew it goes on from theirs.

    Args:
        names: the columns to keep; None keeps every number.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names
        self._columns: dict[str, array[float]] = {"samples_seen": array("d"), "elapsed_s": array("d")}
        self._shift_s = 0.0
        self.last: Mapping[str, Any] = {}

    def __len__(self) -> int:
        return len(self._columns["samples_seen"])

    def __contains__(self, name: str) -> bool:
        return name in self._columns and not np.isnan(self[name]).all()

    def __getitem__(self, name: str) -> Numbers:
        column = self._columns.get(name)
        return np.full(len(self), np.nan) if column is None else np.array(column)

    @property
    def names(self) -> list[str]:
        """Columns that have numbers."""
        return [name for name in self._columns if name in self]

    def add(self, row: Mapping[str, Any]) -> None:
        """One more row; one without `elapsed_s` or `samples_seen` is left out."""
        kept = row.keys() if self._names is None else row.keys() & self._names
        numbers = {key: number(row[key]) for key in kept}
        samples_seen, elapsed_s = number(row.get("samples_seen")), number(row.get("elapsed_s"))
        if not (math.isfinite(samples_seen) and math.isfinite(elapsed_s)):
            return
        self._take_back(samples_seen)
        if len(self) and elapsed_s + self._shift_s < self._columns["elapsed_s"][-1]:
            self._shift_s = self._columns["elapsed_s"][-1] - elapsed_s
        numbers |= {"samples_seen": samples_seen, "elapsed_s": elapsed_s + self._shift_s}
        for name in numbers.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan]) * len(self)
        for name, column in self._columns.items():
            column.append(numbers.get(name, math.nan))
        self.last = row

    def _take_back(self, samples_seen: float) -> None:
        while len(self) and self._columns["samples_seen"][-1] > samples_seen:
            for column in self._columns.values():
                column.pop()


def number(value: object) -> float:
    """The value if it is a number, else NaN; true and false are none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def thinned(values: Numbers, points: int = MOST_POINTS) -> Numbers:
    """At most so many values, each the mean of equally many neighbours.

    >>> thinned(np.arange(6.0), points=3)
    array([0.5, 2.5, 4.5])
    """
    if len(values) <= points:
        return values
    edges = np.linspace(0, len(values), points + 1).astype(int)
    return np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def grid(tracks: Sequence[Track], points: int = MOST_POINTS) -> Numbers:
    """Equally spaced times from the first row of any track to the last, no more of them than the longest track has rows."""
    times = [track["elapsed_s"] for track in tracks if len(track)]
    if not times:
        return np.empty(0)
    longest = max(map(len, times))
    return np.linspace(min(map(np.min, times)), max(map(np.max, times)), min(points, longest))


def on_grid(tracks: Sequence[Track], name: str, times: Numbers) -> Numbers:
    """Column `name` of every track at `times`, one row a track; NaN long before its first row and long after its last.

    Learners tell at different moments: a value holds for one and a half times as long as one usually waits for the next.
    """
    rows = [_at(track, name, times) for track in tracks if len(track)]
    return np.array(rows).reshape(len(rows), len(times))


def _at(track: Track, name: str, times: Numbers) -> Numbers:
    known = track["elapsed_s"]
    usual_s = np.median(np.diff(known)) if len(known) > 1 else known[0]
    hold_s = 1.5 * float(usual_s)
    values = np.interp(times, known, track[name])
    values[(times < known[0] - hold_s) | (times > known[-1] + hold_s)] = np.nan
    return values
