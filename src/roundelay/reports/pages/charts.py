"""What a chart shows, as plain values; page.js draws it in the colours of the reader's scheme.

A curve has its `x` twice, over time (seconds) and over samples of all learners, so that the reader can switch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roundelay.reports.pages.runs import Run
from roundelay.reports.pages.tracks import Numbers, Track, thinned

COLOURS = 10  # --c0 ... in page.css; further runs take them again, dashed

Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One figure of the page: its words, and for the script its traces.

    Attributes:
        kind: `curves` over time or samples, `bars` per learner, or a `matrix` of learners.
        y: what the vertical axis counts, where the title does not say it.
        legend: (colour, label) pairs beyond the runs, which the page explains once.
        top: the end of the vertical axis, where several charts share it.
        logarithmic: the reader may have the vertical axis so.
    """

    title: str
    note: str
    traces: list[Trace]
    kind: str = "curves"
    y: str = ""
    legend: list[tuple[str, str]] = field(default_factory=list)
    top: float | None = None
    logarithmic: bool = False

    def data(self) -> dict[str, Any]:
        """For the script."""
        return {"kind": self.kind, "y": self.y, "traces": self.traces, "top": self.top}


def colour(index: int) -> str:
    """The name of the n-th colour of the style sheet."""
    return f"c{index % COLOURS}"


def curve(track: Track, name: str) -> Trace:
    """A column of a track."""
    x = {"time": numbers(thinned(track["elapsed_s"])), "samples": numbers(thinned(track["samples_seen"]))}
    return {"x": x, "y": numbers(thinned(track[name]))}


def line(run: Run, times: Numbers, values: Numbers) -> Trace:
    """Values at times of a run."""
    return {"x": over(run, times), "y": numbers(values)}


def band(run: Run, times: Numbers, values: Numbers, percent: tuple[int, int]) -> Trace:
    """Between two percentiles over learners, at the times when one was heard."""
    present = ~np.isnan(values).all(axis=0)
    low, high = np.nanpercentile(values[:, present], percent, axis=0)
    return {"style": "band", "x": over(run, times[present]), "low": numbers(low), "high": numbers(high)}


def heat(x: Any, learners: list[int], values: Numbers) -> Trace:  # noqa: ANN401
    """One row of colours a learner; `top` has the darkest."""
    top = rounded(float(np.nanmax(values)))
    return {"style": "heat", "x": x, "y": learners, "z": [numbers(row) for row in values], "top": top}


def over(run: Run, times: Numbers) -> dict[str, list[float | None]]:
    """Both abscissae of these times."""
    return {"time": numbers(times), "samples": numbers(run.samples_seen_at(times))}


def top_of(traces: Iterable[Trace]) -> float | None:
    """Room for the highest curve, on an axis that begins at 0."""
    values = [value for trace in traces for value in trace.get("high") or trace["y"] if value is not None]
    return rounded(1.05 * max(values)) if values and max(values) > 0 else None


def numbers(values: Iterable[float]) -> list[float | None]:
    """As JSON has them."""
    return [rounded(float(value)) for value in values]


def rounded(value: float) -> float | None:
    """Six digits are more than a chart can show; JSON has no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def as_script(document: object) -> str:
    r"""JSON that can stand inside a script element, whatever its texts contain.

    >>> as_script("</script>")
    '"\\u003c/script\\u003e"'
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
