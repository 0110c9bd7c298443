"""Curves that compare runs: learning, speed, agreement; and the events that mark them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from roundelay.reports.pages.charts import COLOURS, Chart, Trace, band, colour, curve, line, rounded, top_of
from roundelay.reports.pages.runs import Run
from roundelay.reports.pages.tracks import grid, number, on_grid

MOST_MARKS = 40  # events; more would hide the curves


def learning(runs: Sequence[Run]) -> list[Chart]:
    """Every figure of the evaluations, and the learning rate."""
    figures = dict.fromkeys(name for run in runs for name in run.figures)
    charts = [_figure(name, runs) for name in dict.fromkeys(["loss", *figures])]
    charts.append(Chart("learning rate", "As the schedule set it.", list(_across(runs, "lr", np.nanmedian))))
    return [chart for chart in charts if chart.traces]


def _figure(name: str, runs: Sequence[Run]) -> Chart:
    training = list(_across(runs, name, np.nanmean)) if name == "loss" else []
    traces = [trace | {"style": "faint", "name": "training"} for trace in training]
    splits = set()
    for index, run in enumerate(runs):
        for split, track in run.evaluations.items():
            if name in track:
                splits.add(split)
                style = "points" if split == "test" else "marked"
                traces.append(curve(track, name) | _identity(index, run) | {"style": style, "name": split})
    notes = ["Of the mean model"] if splits else []
    notes += ["diamonds: test"] if "test" in splits else []
    notes += ["faint: in training, mean of the learners"] if training else []
    return Chart(name, "; ".join(notes) + ".", traces, logarithmic=name == "loss")


def speed(runs: Sequence[Run]) -> list[Chart]:
    """Samples a second of all learners together."""
    traces = list(_across(runs, "samples_per_s", np.nansum))
    note = "Samples a second, all learners together."
    return [Chart("throughput", note, traces, top=top_of(traces))] if traces else []


def agreement(runs: Sequence[Run]) -> list[Chart]:
    """How far learners are apart, and how old their gradients."""
    shown = {
        "spread": "Rms distance of the replicas from their mean, as learners see it; median and range over learners.",
        "staleness_mean": "Exchanges between reading weights and applying their gradient; median and range over learners.",
    }
    charts = []
    for name, note in shown.items():
        traces = [*_ranges(runs, name), *_across(runs, name, np.nanmedian)]
        if traces:
            title, logarithmic = name.removesuffix("_mean"), name == "spread"
            charts.append(Chart(title, note, traces, top=top_of(traces), logarithmic=logarithmic))
    return charts


def marks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Events, for the charts over time; none if there are too many to see."""
    found = []
    for index, run in enumerate(runs):
        events = [row for row in run.events if math.isfinite(number(row.get("elapsed_s")))]
        times = np.array([number(row["elapsed_s"]) for row in events])
        for row, time, place in zip(events, times, run.samples_seen_at(times), strict=True):
            x = {"time": rounded(time), "samples": rounded(place)}
            found.append({"run": index, "colour": colour(index), "x": x, "text": describe(row)})
    return found if len(found) <= MOST_MARKS else []


def describe(event: dict[str, Any]) -> str:
    """An event in words.

    >>> describe({"event": "lost", "learner": 3})
    'lost, learner 3'
    """
    who = event.get("learner")
    return str(event.get("event", "event")) + ("" if who is None else f", learner {who}")


def _across(runs: Sequence[Run], name: str, summary: Callable[..., Any]) -> Iterator[Trace]:
    """For every run one curve: a summary over its learners."""
    for index, run in enumerate(runs):
        tracks = [track for track in run.learners.values() if name in track]
        times = grid(tracks)
        if len(times):
            values = on_grid(tracks, name, times)
            present = ~np.isnan(values).all(axis=0)
            curve = line(run, times[present], summary(values[:, present], axis=0))
            yield curve | _identity(index, run) | {"style": "line"}


def _ranges(runs: Sequence[Run], name: str) -> Iterator[Trace]:
    for index, run in enumerate(runs):
        tracks = [track for track in run.learners.values() if name in track]
        times = grid(tracks)
        if len(tracks) > 1:
            yield band(run, times, on_grid(tracks, name, times), (0, 100)) | _identity(index, run) | {"strength": 0.14}


def _identity(index: int, run: Run) -> Trace:
    dashed = index >= COLOURS
    return {"run": index, "colour": colour(index), "label": run.name, "dashed": dashed}
