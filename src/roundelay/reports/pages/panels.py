"""The learners of one run: who was how fast, what a step's time went into, who averaged with whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from roundelay.reports.pages.charts import Chart, Trace, band, colour, curve, heat, line, numbers, over, rounded
from roundelay.reports.pages.runs import Run
from roundelay.reports.pages.tracks import Track, grid, number, on_grid

MOST_LINES = 10  # learners; more are shown as bands and as a heat map
MOST_IN_MATRIX = 256


def learners(run: Run, index: int, top: float | None) -> list[Chart]:
    """Everything about the learners of the run with this index; `top` ends the axis of their throughput."""
    throughput = _lines if len(run.learners) <= MOST_LINES else _bands
    charts = [*throughput(run, index, top), _parts_of_a_step(run), _exchanges(run)]
    return [chart for chart in charts if chart.traces]


def fastest(runs: Sequence[Run]) -> float | None:
    """The end of an axis on which every learner's throughput has room."""
    tops = [np.nanmax(track["samples_per_s"]) for run in runs for track in _timed(run).values()]
    return rounded(1.05 * max(tops)) if tops else None


def _lines(run: Run, index: int, top: float | None) -> Iterator[Chart]:
    traces: list[Trace] = []
    for place, (learner, track) in enumerate(_timed(run).items()):
        look = {"style": "line", "run": index, "colour": colour(place), "name": f"learner {learner}"}
        traces.append(curve(track, "samples_per_s") | look)
    legend = [(trace["colour"], trace["name"]) for trace in traces]
    yield Chart("throughput", "Samples a second of every learner.", traces, legend=legend, top=top)


def _bands(run: Run, index: int, top: float | None) -> Iterator[Chart]:
    tracks = _timed(run)
    times = grid(list(tracks.values()))
    if not len(times):
        return
    values = on_grid(list(tracks.values()), "samples_per_s", times)
    heard = ~np.isnan(values).all(axis=0)
    traces = [
        band(run, times, values, (0, 100)) | {"strength": 0.14},
        band(run, times, values, (25, 75)) | {"strength": 0.3},
        line(run, times[heard], np.nanmedian(values[:, heard], axis=0)) | {"style": "line", "name": "median"},
    ]
    traces = [trace | {"run": index, "colour": colour(index)} for trace in traces]
    note = f"Samples a second of {len(tracks)} learners: median, middle half, and range."
    yield Chart("throughput", note, traces, top=top)
    by_learner = heat(over(run, times), list(tracks), values)
    yield Chart("throughput by learner", "Samples a second; a gap: nothing heard of it.", [by_learner], y="learner")


def _timed(run: Run) -> dict[int, Track]:
    return {learner: track for learner, track in run.learners.items() if "samples_per_s" in track}


def _parts_of_a_step(run: Run) -> Chart:
    parts = ("compute", "mix", "wait")
    last = {learner: track.last for learner, track in run.learners.items()}
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
    legend = [(part, part) for part in parts]
    return Chart("time of a step", "Milliseconds a step, by learner.", traces, "bars", "ms", legend)


def _exchanges(run: Run) -> Chart:
    """Row i, column j: exchanges that learner i counted with learner j."""
    size = 1 + max(run.learners, default=-1)
    counts = np.full((size, size), np.nan)
    for learner, track in run.learners.items():
        for peer in range(size):
            counts[learner, peer] = number(track.last.get(f"exchanges_with_{peer}"))
    traces: list[Trace] = []
    if not np.isnan(counts).all() and size <= MOST_IN_MATRIX:
        ranks = list(range(size))
        traces = [heat(ranks, ranks, counts)]
    return Chart("exchanges", "How often learners averaged with each other.", traces, "matrix", "learner")
