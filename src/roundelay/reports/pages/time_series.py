"""Columns of numbers over time, as one learner, or the evaluations of one split, wrote them to the metrics."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

MOST_POINTS = 240  # points of a curve; a chart is not wide enough for more


class TimeSeries:
    """Columns of numbers with one entry per row; a number that a row lacks is NaN.

    A run that was resumed from a checkpoint writes again what it had written after that checkpoint. So a row with fewer
    `samples_seen` than the last row removes the rows after its point. If the clock of the resumed run started again at 0,
    its times continue from the last row.

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
        """Columns that have at least one number."""
        return [name for name in self._columns if name in self]

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row. A row without `samples_seen` or `elapsed_s` is ignored."""
        kept = row.keys() if self._names is None else row.keys() & self._names
        numbers = {key: number(row[key]) for key in kept}
        samples_seen, elapsed_s = number(row.get("samples_seen")), number(row.get("elapsed_s"))
        if not (math.isfinite(samples_seen) and math.isfinite(elapsed_s)):
            return
        self._remove_after(samples_seen)
        if len(self) and elapsed_s + self._shift_s < self._columns["elapsed_s"][-1]:
            self._shift_s = self._columns["elapsed_s"][-1] - elapsed_s
        numbers |= {"samples_seen": samples_seen, "elapsed_s": elapsed_s + self._shift_s}
        for name in numbers.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan]) * len(self)
        for name, column in self._columns.items():
            column.append(numbers.get(name, math.nan))
        self.last = {**self.last, **row}  # the last row of a run has no speed and no loss of its own

    def _remove_after(self, samples_seen: float) -> None:
        while len(self) and self._columns["samples_seen"][-1] > samples_seen:
            for column in self._columns.values():
                column.pop()


def number(value: object) -> float:
    """The value if it is an int or a float, else NaN; a bool is no number here."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def downsampled(values: Numbers, points: int = MOST_POINTS) -> Numbers:
    """At most `points` values, each the mean of equally many neighbours.

    >>> downsampled(np.arange(6.0), points=3)
    array([0.5, 2.5, 4.5])
    """
    if len(values) <= points:
        return values
    edges = np.linspace(0, len(values), points + 1).astype(int)
    return np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def common_times(series: Sequence[TimeSeries], points: int = MOST_POINTS) -> Numbers:
    """Equally spaced times from the first row of any series to the last; no more of them than the longest series has rows."""
    times = [each["elapsed_s"] for each in series if len(each)]
    if not times:
        return np.empty(0)
    longest = max(map(len, times))
    return np.linspace(min(map(np.min, times)), max(map(np.max, times)), min(points, longest))


def values_at(series: Sequence[TimeSeries], name: str, times: Numbers) -> Numbers:
    """Column `name` of every series at `times`, one row per series. NaN long before its first row and long after its last.

    Learners write at different moments, so a value is valid for 1.5 times the usual interval between two rows.
    """
    rows = [_at(each, name, times) for each in series if len(each)]
    return np.array(rows).reshape(len(rows), len(times))


def _at(series: TimeSeries, name: str, times: Numbers) -> Numbers:
    known, column = series["elapsed_s"], series[name]
    usual_s = np.median(np.diff(known)) if len(known) > 1 else known[0]
    valid_s = 1.5 * float(usual_s)
    used = ~_alone(np.isnan(column))
    values = np.interp(times, known[used], column[used])
    values[(times < known[0] - valid_s) | (times > known[-1] + valid_s)] = np.nan
    return values


def _alone(missing: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Where a number is missing between two that are there, as in the last row of a run, which has no speed and no loss.

    Taken as NaN, it would make a sum over learners fall at the end of a run, and where a run was resumed.
    """
    around = np.pad(missing, 1)
    return missing & ~around[:-2] & ~around[2:]
