"""Charts of the learners of one run: throughput, time of a step, exchanges between learners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from roundelay.reports.pages.charts import (
    Chart,
    Trace,
    band,
    colour,
    curve,
    heat_map,
    numbers,
    rounded,
    series_curve,
    tones,
    x_values,
)
from roundelay.reports.pages.run import Run
from roundelay.reports.pages.time_series import TimeSeries, common_times, number, values_at

MOST_LINES = 10  # more learners than this are shown as bands and as a heat map
MOST_IN_MATRIX = 256


def learner_charts(run: Run, index: int, top: float | None) -> list[Chart]:
    """All charts of the learners of the run with this index; `top` is the end of the throughput axis."""
    throughput = _lines if len(run.learners) <= MOST_LINES else _bands
    charts = [*throughput(run, index, top), _parts_of_a_step(run), _exchanges(run)]
    return [chart for chart in charts if chart.traces]


def throughput_top(runs: Sequence[Run]) -> float | None:
    """End of an axis that has room for the throughput of every learner of these runs."""
    tops = [np.nanmax(series["samples_per_s"]) for run in runs for series in _timed(run).values()]
    return rounded(1.05 * max(tops)) if tops else None


def _lines(run: Run, index: int, top: float | None) -> Iterator[Chart]:
    traces: list[Trace] = []
    timed = _timed(run)
    for tone, (learner, series) in zip(tones(len(timed)), timed.items(), strict=True):
        style = {"style": "line", "run": index, "colour": colour(index), "tone": tone, "name": f"learner {learner}"}
        traces.append(series_curve(series, "samples_per_s") | style)
    legend = [(trace["colour"], trace["tone"], trace["name"]) for trace in traces]
    yield Chart("throughput", "Samples per second of every learner.", traces, legend=legend, top=top)


def _bands(run: Run, index: int, top: float | None) -> Iterator[Chart]:
    timed = _timed(run)
    times = common_times(list(timed.values()))
    if not len(times):
        return
    values = values_at(list(timed.values()), "samples_per_s", times)
    present = ~np.isnan(values).all(axis=0)
    traces = [
        band(run, times, values, (0, 100)) | {"strength": 0.14},
        band(run, times, values, (25, 75)) | {"strength": 0.3},
        curve(run, times[present], np.nanmedian(values[:, present], axis=0)) | {"style": "line", "name": "median"},
    ]
    traces = [trace | {"run": index, "colour": colour(index)} for trace in traces]
    note = f"Samples per second of {len(timed)} learners: median, middle half, and range."
    yield Chart("throughput", note, traces, top=top)
    by_learner = heat_map(x_values(run, times), list(timed), values)
    yield Chart(
        "throughput by learner",
        "Samples per second; a gap means that the learner wrote no rows.",
        [by_learner],
        y="learner",
    )


def _timed(run: Run) -> dict[int, TimeSeries]:
    return {learner: series for learner, series in run.learners.items() if "samples_per_s" in series}


def _parts_of_a_step(run: Run) -> Chart:
    parts = ("compute", "mix", "wait")
    last = {learner: series.last for learner, series in run.learners.items()}
    known = [learner for learner, row in last.items() if any(f"{part}_s" in row for part in parts)]
    traces = [
        {
            "style": "bar",
            "name": part,
            "colour": part,
            "x": known,
            "y": numbers([1e3 * number(last[learner].get(f"{part}_s")) for learner in known]),
        }
        for part in parts
        if known
    ]
    legend = [(part, 0.0, part) for part in parts]
    return Chart("time of a step", "Milliseconds per step, by learner.", traces, "bars", "ms", legend=legend)


def _exchanges(run: Run) -> Chart:
    """Row i, column j: exchanges in which learner i called learner j."""
    size = 1 + max(run.learners, default=-1)
    counts = np.full((size, size), np.nan)
    for learner, series in run.learners.items():
        for peer in range(size):
            counts[learner, peer] = number(series.last.get(f"exchanges_with_{peer}"))
    traces: list[Trace] = []
    if not np.isnan(counts).all() and size <= MOST_IN_MATRIX:
        ranks = list(range(size))
        traces = [heat_map(ranks, ranks, counts)]
    note = "How often the learner of a row called the learner of a column to average with it."
    return Chart("exchanges", note, traces, "matrix", y="calling learner", x="called learner")
