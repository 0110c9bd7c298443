"""One run, as its folder describes it: finished, under way, stopped, resumed or empty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from roundelay.reports.pages.formats import duration
from roundelay.reports.pages.time_series import Numbers, TimeSeries, number
from roundelay.training.metrics import Row

# Columns of a learner's rows that are drawn over time. Of the other columns only the last value is shown.
OVER_TIME = frozenset({"loss", "lr", "samples_per_s", "spread", "staleness_mean"})
NOT_A_FIGURE = frozenset({"samples_seen", "elapsed_s", "samples", "learner"})
SPLITS = ("valid", "test")


@dataclass
class Run:
    """The content of a run's folder. Whatever the folder lacks is empty."""

    name: str  # what the page calls the run; says so if the run was simulated
    config: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of speech: evaluation-NAME.json by NAME
    simulated: bool = False
    learners: dict[int, TimeSeries] = field(default_factory=dict)
    evaluations: dict[str, TimeSeries] = field(default_factory=dict)
    events: list[Row] = field(default_factory=list)
    _now_s: float = math.nan

    def add(self, row: Row) -> bool:
        """Add one row of the metrics. Returns False, and ignores the row, if it is of an unknown kind or misses a number.

        The supervisor does not know the clock of the learners, so its events have no time: they get that of the row before.
        """
        self._now_s = first_number(row.get("elapsed_s"), self._now_s)
        learner, counted = row.get("learner"), all(number(row.get(name)) >= 0 for name in ("elapsed_s", "samples_seen"))
        if row["kind"] == "learner" and counted and type(learner) is int and learner >= 0:
            self.learners.setdefault(learner, TimeSeries(OVER_TIME)).add(row)
        elif row["kind"] == "evaluation" and counted:
            self.evaluations.setdefault(str(row.get("split", "valid")), TimeSeries()).add(row)
        elif row["kind"] == "event":
            self.events.append({"elapsed_s": self._now_s} | row)
        else:
            return False
        return True

    @property
    def finished(self) -> bool:
        """Whether the run has used its whole budget."""
        return bool(self.results.get("finished"))

    @property
    def elapsed_s(self) -> float:
        """How long the run took, or has taken so far; NaN without any row."""
        return first_number(self.results.get("elapsed_s"), *self._clock[0][-1:])

    @property
    def samples(self) -> float:
        """Samples that all learners have used; NaN without any row."""
        return first_number(self.results.get("samples"), *self._clock[1][-1:])

    @property
    def progress(self) -> float:
        """Used fraction of the budget; NaN if the rows do not say how large the budget is."""
        totals = [number(series.last.get("total")) for series in self.learners.values()]
        return self.samples / max(totals) if totals and min(totals) > 0 else math.nan

    @property
    def size(self) -> int | None:
        """Number of learners; None if it is not recorded."""
        configured = first_number(self.config.get("learners"), self.results.get("learners"))
        return len(self.learners) or None if math.isnan(configured) else int(configured)

    @property
    def figures(self) -> list[str]:
        """Names of the figures that the run was evaluated by, loss first."""
        found = [name for series in self.evaluations.values() for name in series.names]
        found += [name for split in SPLITS for name in self.result(split)]
        return sorted(
            dict.fromkeys(name for name in found if name not in NOT_A_FIGURE), key=lambda name: name != "loss"
        )

    @property
    def state(self) -> str:
        """Whether the run has finished, and if not, how far it came."""
        if self.finished:
            return "finished"
        if math.isnan(self.elapsed_s):
            return "no figures yet"
        part = "" if math.isnan(self.progress) else f"{self.progress:.0%} of its budget, "
        return f"not finished: {part}last row after {duration(self.elapsed_s)}"

    def known(self, split: str, name: str) -> bool:
        """Whether the run has such a figure."""
        return not math.isnan(self.figure(split, name))

    def figure(self, split: str, name: str) -> float:
        """A figure from results.json, else from the last evaluation; NaN if neither has it."""
        series = self.evaluations.get(split)
        return first_number(self.result(split).get(name), series[name][-1] if series else None)

    def result(self, split: str) -> Mapping[str, Any]:
        """Figures of a split in results.json; empty if the run has not finished."""
        figures = self.results.get(split)
        return figures if isinstance(figures, dict) else {}

    @cached_property
    def _clock(self) -> tuple[Numbers, Numbers]:
        """Times, and the samples that all learners had used by then; neither ever decreases."""
        filled = [series for series in (*self.learners.values(), *self.evaluations.values()) if len(series)]
        if not filled:
            return np.empty(0), np.empty(0)
        times = np.concatenate([series["elapsed_s"] for series in filled])
        samples_seen = np.concatenate([series["samples_seen"] for series in filled])
        order = np.argsort(times, kind="stable")
        return times[order], np.maximum.accumulate(samples_seen[order])

    def samples_seen_at(self, times: Numbers) -> Numbers:
        """Samples that all learners had used by these times; NaN without any row."""
        known, samples_seen = self._clock
        return np.interp(times, known, samples_seen) if len(known) else np.full(len(times), np.nan)


def first_number(*values: object) -> float:
    """The first of the values that is a number and not NaN; NaN if there is none."""
    return next((found for found in map(number, values) if not math.isnan(found)), math.nan)
