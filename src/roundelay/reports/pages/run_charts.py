"""Charts that compare runs: learning, speed and agreement; and the events that are marked in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from roundelay.reports.pages.charts import COLOURS, Chart, Trace, axis_top, band, colour, curve, rounded, series_curve
from roundelay.reports.pages.formats import event_text
from roundelay.reports.pages.run import Run
from roundelay.reports.pages.time_series import common_times, number, values_at

MOST_MARKS = 40  # more marks than this would hide the curves
MOST_NAMED = 6  # events in the text of a mark


def learning(runs: Sequence[Run], *, without_loss: bool = False) -> list[Chart]:
    """A chart for every figure of the evaluations, and one for the learning rate."""
    figures = dict.fromkeys(name for run in runs for name in run.figures)
    names = [name for name in dict.fromkeys(["loss", *figures]) if not (without_loss and name == "loss")]
    charts = [figure_chart(name, runs) for name in names]
    charts.append(Chart("learning rate", "As the schedule set it.", list(_across(runs, "lr", np.nanmedian))))
    return [chart for chart in charts if chart.traces]


def figure_chart(name: str, runs: Sequence[Run]) -> Chart:
    """One figure of the mean model over time; with the loss in training, if it is the loss."""
    training = list(_across(runs, name, np.nanmean)) if name == "loss" else []
    traces = [trace | {"style": "faint", "name": "training"} for trace in training]
    splits = set()
    for index, run in enumerate(runs):
        for split, series in run.evaluations.items():
            if name in series:
                splits.add(split)
                style = "points" if split == "test" else "marked"
                traces.append(series_curve(series, name) | _identity(index, run) | {"style": style, "name": split})
    notes = ["Of the mean model"] if splits else []
    notes += ["diamonds: test"] if "test" in splits else []
    notes += ["faint: in training, mean over the learners"] if training else []
    notes += ["triangles: events"] if any(run.events for run in runs) else []
    return Chart(name, "; ".join(notes) + ".", traces, logarithmic=name == "loss")


def speed(runs: Sequence[Run]) -> list[Chart]:
    """Samples per second, summed over the learners of each run."""
    traces = list(_across(runs, "samples_per_s", np.nansum))
    note = "Samples per second, all learners together."
    return [Chart("throughput", note, traces, top=axis_top(traces))] if traces else []


def agreement(runs: Sequence[Run]) -> list[Chart]:
    """How far the weights of the learners are apart, and how old their gradients are."""
    notes = {
        "spread": "Rms distance of the replicas from their mean, as learners estimate it; median and range over learners.",
        "staleness_mean": "Exchanges between reading weights and applying their gradient; median and range over learners.",
    }
    charts = []
    for name, note in notes.items():
        traces = [*_ranges(runs, name), *_across(runs, name, np.nanmedian)]
        if traces:
            title, logarithmic = name.removesuffix("_mean"), name == "spread"
            charts.append(Chart(title, note, traces, top=axis_top(traces), logarithmic=logarithmic))
    return charts


def marks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Events to mark in the curves. If there are many, events that are close in time share a mark."""
    events = [
        (number(row["elapsed_s"]), index, row)
        for index, run in enumerate(runs)
        for row in run.events
        if math.isfinite(number(row.get("elapsed_s")))
    ]
    events.sort(key=lambda each: each[0])
    many = len(events) > MOST_MARKS
    apart_s = max((events[-1][0] - events[0][0]) * len(runs) / MOST_MARKS, 1e-9) if many else 0.0
    found: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        shared: list[tuple[float, list[str]]] = []
        for time, _, row in (each for each in events if each[1] == index):
            if not shared or time - shared[-1][0] >= apart_s:
                shared.append((time, []))
            shared[-1][1].append(event_text(row))
        times = np.array([time for time, _ in shared])
        for (time, texts), samples_seen in zip(shared, run.samples_seen_at(times), strict=True):
            x = {"time": rounded(time), "samples": rounded(float(samples_seen))}
            found.append({"run": index, "colour": colour(index), "x": x, "text": _listed(texts)})
    return found


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - MOST_NAMED
    return "; ".join(texts[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _across(runs: Sequence[Run], name: str, summary: Callable[..., Any]) -> Iterator[Trace]:
    """One curve per run: column `name`, summarised over the learners of the run."""
    for index, run in enumerate(runs):
        series = [each for each in run.learners.values() if name in each]
        times = common_times(series)
        if len(times):
            values = values_at(series, name, times)
            present = ~np.isnan(values).all(axis=0)
            trace = curve(run, times[present], summary(values[:, present], axis=0))
            yield trace | _identity(index, run) | {"style": "line"}


def _ranges(runs: Sequence[Run], name: str) -> Iterator[Trace]:
    """One band per run with several learners: from the smallest to the largest value over its learners."""
    for index, run in enumerate(runs):
        series = [each for each in run.learners.values() if name in each]
        times = common_times(series)
        if len(series) > 1:
            trace = band(run, times, values_at(series, name, times), (0, 100))
            yield trace | _identity(index, run) | {"strength": 0.14}


def _identity(index: int, run: Run) -> Trace:
    return {"run": index, "colour": colour(index), "label": run.name, "dashed": index >= COLOURS}
