"""What the charts show, as plain values; page.js draws them in the colours of the reader's scheme.

A curve has its `x` twice, over time (seconds) and over samples of all learners, so that the reader can switch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roundelay.plots.report.runs import Run
from roundelay.plots.report.tracks import Numbers, Track, grid, number, on_grid, thinned

COLOURS = 10  # --c0 ... in page.css; further runs take them again, dashed
MOST_LINES = 10  # learners; more are shown as bands and as a heat map
MOST_IN_MATRIX = 256
MOST_MARKS = 40  # events; more would hide the curves

Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One figure of the page: its words, and for the script its traces.

    Attributes:
        kind: `curves` over time or samples, `bars` per learner, or a `matrix` of learners.
        y: what the vertical axis counts.
        legend: (colour, label) pairs beyond the runs, which the page explains once.
        top: the end of the vertical axis, where several charts share it.
        logarithmic: the reader may have the vertical axis so.
    """

    title: str
    note: str
    kind: str
    y: str
    traces: list[Trace]
    legend: list[tuple[str, str]] = field(default_factory=list)
    top: float | None = None
    logarithmic: bool = False

    def data(self) -> dict[str, Any]:
        """For the script."""
        return {"kind": self.kind, "y": self.y, "traces": self.traces, "top": self.top}


def colour(index: int) -> str:
    """The name of the n-th colour of the style sheet."""
    return f"c{index % COLOURS}"


def learning(runs: Sequence[Run]) -> list[Chart]:
    """Every figure of the evaluations, and the learning rate."""
    figures = dict.fromkeys(name for run in runs for name in run.figures)
    charts = [_figure(name, runs) for name in dict.fromkeys(["loss", *figures])]
    charts.append(
        Chart("learning rate", "As the schedule set it.", "curves", "", list(_across(runs, "lr", np.nanmedian)))
    )
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
                traces.append(_curve(track, name) | _identity(index, run) | {"style": style, "name": split})
    notes = ["Of the mean model"] if splits else []
    notes += ["diamonds: test"] if "test" in splits else []
    notes += ["faint: in training, mean of the learners"] if training else []
    return Chart(name, "; ".join(notes) + ".", "curves", "", traces, logarithmic=name == "loss")


def speed(runs: Sequence[Run]) -> list[Chart]:
    """Samples a second of all learners together."""
    traces = list(_across(runs, "samples_per_s", np.nansum))
    note = "Samples a second, all learners together."
    return [Chart("throughput", note, "curves", "", traces, top=_top(traces))] if traces else []


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
            charts.append(Chart(title, note, "curves", "", traces, top=_top(traces), logarithmic=logarithmic))
    return charts


def learners(run: Run, index: int, top: float | None) -> list[Chart]:
    """One run: who was how fast, and what its time went into."""
    charts = [*_throughputs(run, index, top), _parts_of_a_step(run), _exchanges(run)]
    return [chart for chart in charts if chart.traces]


def fastest(runs: Sequence[Run]) -> float | None:
    """The end of an axis on which every learner's throughput has room."""
    tops = [
        np.nanmax(track["samples_per_s"]) for run in runs for track in run.learners.values() if "samples_per_s" in track
    ]
    return _rounded(1.05 * max(tops)) if tops else None


def _throughputs(run: Run, index: int, top: float | None) -> Iterator[Chart]:
    tracks = {learner: track for learner, track in run.learners.items() if "samples_per_s" in track}
    note = "Samples a second of every learner."
    if len(tracks) <= MOST_LINES:
        traces = [
            _curve(track, "samples_per_s") | {"style": "line", "colour": colour(place), "name": f"learner {learner}"}
            for place, (learner, track) in enumerate(tracks.items())
        ]
        legend = [(colour(place), f"learner {learner}") for place, learner in enumerate(tracks)]
        yield Chart("throughput", note, "curves", "", traces, legend, top)
        return
    times = grid(list(tracks.values()))
    values = on_grid(list(tracks.values()), "samples_per_s", times)
    heard = ~np.isnan(values).all(axis=0)
    traces = [
        _band(run, times, values, (0, 100)) | {"strength": 0.14},
        _band(run, times, values, (25, 75)) | {"strength": 0.3},
        _line(run, times[heard], np.nanmedian(values[:, heard], axis=0)) | {"style": "line", "name": "median"},
    ]
    note = f"Samples a second of {len(tracks)} learners: median, middle half, and range."
    yield Chart("throughput", note, "curves", "", [trace | {"colour": colour(index)} for trace in traces], top=top)
    heat = _heat(_x(run, times), list(tracks), values)
    yield Chart("throughput by learner", "Samples a second; a gap: nothing heard of it.", "curves", "learner", [heat])


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
            "y": _list([1e3 * number(last[learner].get(f"{part}_s")) for learner in known]),
        }
        for part in parts
        if known
    ]
    legend = [(part, part) for part in parts]
    return Chart("time of a step", "Milliseconds a step, by learner.", "bars", "ms", traces, legend)


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
        traces = [_heat(ranks, ranks, counts)]
    return Chart("exchanges", "How often learners averaged with each other.", "matrix", "learner", traces)


def marks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Events, for the charts over time; none if there are too many to see."""
    found = []
    for index, run in enumerate(runs):
        events = [row for row in run.events if math.isfinite(number(row.get("elapsed_s")))]
        times = np.array([number(row["elapsed_s"]) for row in events])
        for row, time, place in zip(events, times, run.place_at(times), strict=True):
            x = {"time": _rounded(time), "samples": _rounded(place)}
            found.append({"run": index, "x": x, "text": describe(row)})
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
            curve = _line(run, times[present], summary(values[:, present], axis=0))
            yield curve | _identity(index, run) | {"style": "line"}


def _ranges(runs: Sequence[Run], name: str) -> Iterator[Trace]:
    for index, run in enumerate(runs):
        tracks = [track for track in run.learners.values() if name in track]
        times = grid(tracks)
        if len(tracks) > 1:
            yield _band(run, times, on_grid(tracks, name, times), (0, 100)) | _identity(index, run) | {"strength": 0.14}


def _identity(index: int, run: Run) -> Trace:
    dashed = index >= COLOURS
    return {"run": index, "colour": colour(index), "label": run.name, "dashed": dashed}


def _curve(track: Track, name: str) -> Trace:
    x = {"time": _list(thinned(track["elapsed_s"])), "samples": _list(thinned(track["place"]))}
    return {"x": x, "y": _list(thinned(track[name]))}


def _line(run: Run, times: Numbers, values: Numbers) -> Trace:
    return {"x": _x(run, times), "y": _list(values)}


def _band(run: Run, times: Numbers, values: Numbers, percent: tuple[int, int]) -> Trace:
    present = ~np.isnan(values).all(axis=0)
    low, high = np.nanpercentile(values[:, present], percent, axis=0)
    return {"style": "band", "x": _x(run, times[present]), "low": _list(low), "high": _list(high)}


def _heat(x: Any, learners: list[int], values: Numbers) -> Trace:  # noqa: ANN401
    top = _rounded(float(np.nanmax(values)))
    return {"style": "heat", "x": x, "y": learners, "z": [_list(row) for row in values], "top": top}


def _x(run: Run, times: Numbers) -> dict[str, list[float | None]]:
    return {"time": _list(times), "samples": _list(run.place_at(times))}


def _top(traces: Iterable[Trace]) -> float | None:
    """Room for the highest curve, on an axis that begins at 0."""
    values = [value for trace in traces for value in trace.get("high") or trace["y"] if value is not None]
    return _rounded(1.05 * max(values)) if values and max(values) > 0 else None


def _list(values: Iterable[float]) -> list[float | None]:
    return [_rounded(float(value)) for value in values]


def _rounded(value: float) -> float | None:
    """Six digits are more than a chart can show; JSON has no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def as_script(document: object) -> str:
    r"""JSON that can stand inside a script element, whatever its texts contain.

    >>> as_script("</script>")
    '"\\u003c/script\\u003e"'
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
