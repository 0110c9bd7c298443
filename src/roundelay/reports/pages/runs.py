"""A run as it lies on disk: finished, under way, stopped, resumed or empty."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.errors import RoundelayError, UsageError
from roundelay.reports.pages.tracks import Numbers, Track, number
from roundelay.training.metrics import Row, read_rows
from roundelay.training.recipes import read_toml

# Of a learner's rows these are drawn over time; of the others only the last value is shown.
OVER_TIME = frozenset({"loss", "lr", "samples_per_s", "spread", "staleness_mean"})
NO_FIGURES = frozenset({"samples_seen", "elapsed_s", "samples", "learner"})
SPLITS = ("valid", "test")
METRICS = "metrics*.jsonl"


@dataclass
class Run:
    """What a run's folder says; whatever is not there is empty."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)
    learners: dict[int, Track] = field(default_factory=dict)
    evaluations: dict[str, Track] = field(default_factory=dict)
    events: list[Row] = field(default_factory=list)
    _now_s: float = math.nan

    def add(self, row: Row) -> None:
        """One row of the metrics; of a kind that is not known it is left out.

        Who watches learners from outside does not know their clock: an event without a time has that of the row before.
        """
        self._now_s = _first_number(row.get("elapsed_s"), self._now_s)
        if row["kind"] == "learner" and isinstance(row.get("learner"), int):
            self.learners.setdefault(row["learner"], Track(OVER_TIME)).add(row)
        elif row["kind"] == "evaluation":
            self.evaluations.setdefault(str(row.get("split", "valid")), Track()).add(row)
        elif row["kind"] == "event":
            self.events.append({"elapsed_s": self._now_s} | row)

    @property
    def finished(self) -> bool:
        """The run has spent its budget."""
        return bool(self.results.get("finished"))

    @property
    def elapsed_s(self) -> float:
        """How long it ran, as far as its files tell; NaN if they tell nothing."""
        return _first_number(self.results.get("elapsed_s"), *self.clock[0][-1:])

    @property
    def samples(self) -> float:
        """How many samples all learners have used."""
        return _first_number(self.results.get("samples"), *self.clock[1][-1:])

    @property
    def progress(self) -> float:
        """The part of its budget that the run has spent; NaN if it has not told its budget."""
        totals = [number(track.last.get("total")) for track in self.learners.values()]
        return self.samples / max(totals) if totals and min(totals) > 0 else math.nan

    @property
    def size(self) -> int | None:
        """How many learners it has, or had."""
        said = _first_number(self.config.get("learners"), self.results.get("learners"))
        return len(self.learners) or None if math.isnan(said) else int(said)

    @property
    def figures(self) -> list[str]:
        """By what it was judged, loss first."""
        found = [name for track in self.evaluations.values() for name in track.names]
        found += [name for split in SPLITS for name in self.result(split)]
        return sorted(dict.fromkeys(name for name in found if name not in NO_FIGURES), key=lambda name: name != "loss")

    def figure(self, split: str, name: str) -> float:
        """What the result says, else the last evaluation; NaN if neither knows it."""
        track = self.evaluations.get(split)
        return _first_number(self.result(split).get(name), track[name][-1] if track else None)

    def result(self, split: str) -> Mapping[str, Any]:
        """The figures of a finished run."""
        said = self.results.get(split)
        return said if isinstance(said, dict) else {}

    @cached_property
    def clock(self) -> tuple[Numbers, Numbers]:
        """Times, and the samples that all learners had used by then; both never fall."""
        tracks = [track for track in (*self.learners.values(), *self.evaluations.values()) if len(track)]
        if not tracks:
            return np.empty(0), np.empty(0)
        times = np.concatenate([track["elapsed_s"] for track in tracks])
        places = np.concatenate([track["samples_seen"] for track in tracks])
        order = np.argsort(times, kind="stable")
        return times[order], np.maximum.accumulate(places[order])

    def samples_seen_at(self, times: Numbers) -> Numbers:
        """Samples that all learners had used by these times."""
        known, places = self.clock
        return np.interp(times, known, places) if len(known) else np.full(len(times), np.nan)


def _first_number(*values: object) -> float:
    return next((found for found in map(number, values) if not math.isnan(found)), math.nan)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, each once, under names that tell them apart.

    Raises UsageError if a folder is not there or holds no run, RoundelayError if a file in it cannot be read.
    """
    distinct = list({folder.resolve(): folder for folder in folders}.values())
    for folder in distinct:
        _check(folder)
    return [_read(folder, name) for folder, name in zip(distinct, names(distinct), strict=True)]


def _check(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not there"
        raise UsageError(f"'{folder}' {what}; a report needs the folder of a run, as `roundelay train --out` makes it")
    if not _is_run(folder):
        inside = [str(each) for each in sorted(folder.iterdir()) if each.is_dir() and _is_run(each)]
        hint = f"did you mean {' '.join(inside[:4])}?" if inside else "`roundelay train --out` makes one"
        raise UsageError(f"no run in '{folder}': it has no config.toml and no metrics.jsonl; {hint}")


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() or any(folder.glob(METRICS))


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that are all different.

    >>> names([Path("/a/x"), Path("/b/x")]), names([Path("/a/x"), Path("/a/y")])
    (['a/x', 'b/x'], ['x', 'y'])
    """
    parts = [folder.resolve().parts for folder in folders]
    ends: list[str] = []
    for length in range(1, max(map(len, parts), default=0) + 1):
        ends = ["/".join(each[-length:]) for each in parts]
        if len(set(ends)) == len(ends):
            break
    return ends


def _read(folder: Path, name: str) -> Run:
    config = folder / "config.toml"
    run = Run(
        name,
        config=read_toml(config) if config.is_file() else {},
        machine=_json(folder / "machine.json"),
        results=_json(folder / "results.json"),
    )
    for row in _rows(folder):
        run.add(row)
    run.events.sort(key=_time)
    run.learners = dict(sorted(run.learners.items()))
    return run


def _json(path: Path) -> Mapping[str, Any]:
    """The object in a file; empty if there is none, or not yet a whole one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows(folder: Path) -> Iterator[Row]:
    """The rows of all files, files that begin earlier first: a learner may go on in another machine's file."""
    try:
        for path in sorted(folder.glob(METRICS), key=_begins):
            yield from read_rows(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RoundelayError(f"cannot read the metrics in '{folder}': {error}") from error


def _begins(path: Path) -> tuple[float, str]:
    return _time(next(read_rows(path), {})), path.name


def _time(row: Row) -> float:
    """When, for sorting: what has no time comes last."""
    return _first_number(row.get("elapsed_s"), math.inf)
