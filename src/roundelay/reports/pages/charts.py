"""Charts as plain values, and their traces. page.js draws them, in the colours of the reader's light or dark scheme.

The x values of a curve come twice: as seconds, and as samples that all learners have used. The reader switches between them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roundelay.reports.pages.run import Run
from roundelay.reports.pages.time_series import Numbers, TimeSeries, downsampled

COLOURS = 10  # --c0 to --c9 in page.css; further runs use these colours again, dashed

Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One figure of the page.

    Attributes:
        kind: `curves` over time or samples, `bars` per learner, or a `matrix` of learners.
        y: label of the vertical axis; empty if the title says it.
        x: label of the horizontal axis of a matrix.
        legend: (colour, tone, label) for colours that do not stand for whole runs.
        level: value at which a horizontal line is drawn.
        top: end of the vertical axis, set if several charts share it.
        logarithmic: whether the reader is offered a logarithmic vertical axis.
    """

    title: str
    note: str
    traces: list[Trace]
    kind: str = "curves"
    y: str = ""
    x: str = "learner"
    legend: list[tuple[str, float, str]] = field(default_factory=list)
    level: float | None = None
    top: float | None = None
    logarithmic: bool = False

    def data(self) -> dict[str, Any]:
        """The part of the chart that page.js reads."""
        shown = {"kind": self.kind, "x": self.x, "y": self.y, "traces": self.traces, "top": self.top}
        return shown | {"level": None if self.level is None else rounded(self.level)}


def colour(index: int) -> str:
    """Name in page.css of the colour of the run with this index."""
    return f"c{index % COLOURS}"


def tones(count: int) -> list[float]:
    """Tones of one colour for `count` learners: from -0.5 (half way to the ink) to 0.6 (towards the paper).

    >>> tones(3), tones(1)
    ([-0.5, 0.05, 0.6], [0.0])
    """
    return [round(-0.5 + 1.1 * each / (count - 1), 3) for each in range(count)] if count > 1 else [0.0]


def toned(name: str, tone: float) -> str:
    """A tone of a colour of page.css, as CSS. page.js mixes in the same way.

    >>> toned("c0", -0.5)
    'color-mix(in srgb, var(--c0) 50%, var(--ink))'
    """
    return f"color-mix(in srgb, var(--{name}) {100 * (1 - abs(tone)):.0f}%, var(--{'ink' if tone < 0 else 'card'}))"


def series_curve(series: TimeSeries, name: str) -> Trace:
    """Curve of one column of a series."""
    x = {"time": numbers(downsampled(series["elapsed_s"])), "samples": numbers(downsampled(series["samples_seen"]))}
    return {"x": x, "y": numbers(downsampled(series[name]))}


def curve(run: Run, times: Numbers, values: Numbers) -> Trace:
    """Curve of values at these times of a run."""
    return {"x": x_values(run, times), "y": numbers(values)}


def band(run: Run, times: Numbers, values: Numbers, percent: tuple[int, int]) -> Trace:
    """Band between two percentiles over learners; `values` has a row per learner. Times without any value are left out."""
    present = ~np.isnan(values).all(axis=0)
    low, high = np.nanpercentile(values[:, present], percent, axis=0)
    return {"style": "band", "x": x_values(run, times[present]), "low": numbers(low), "high": numbers(high)}


def heat_map(x: Any, learners: list[int], values: Numbers) -> Trace:  # noqa: ANN401
    """One row of coloured cells per learner; the value `top` has the darkest colour."""
    top = rounded(float(np.nanmax(values)))
    return {"style": "heat", "x": x, "y": learners, "z": [numbers(row) for row in values], "top": top}


def x_values(run: Run, times: Numbers) -> dict[str, list[float | None]]:
    """Both x values of these times: seconds, and samples that all learners had used by then."""
    return {"time": numbers(times), "samples": numbers(run.samples_seen_at(times))}


def axis_top(traces: Iterable[Trace]) -> float | None:
    """End of an axis that begins at 0 and has room for all traces; None without a positive value."""
    values = [value for trace in traces for value in trace.get("high") or trace["y"] if value is not None]
    return rounded(1.05 * max(values)) if values and max(values) > 0 else None


def numbers(values: Iterable[float]) -> list[float | None]:
    """Values for JSON; NaN and infinities become None."""
    return [rounded(float(value)) for value in values]


def rounded(value: float) -> float | None:
    """The value with six digits, which is more than a chart can show. None if it is not finite, because JSON has no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def as_script(document: object) -> str:
    r"""JSON that is safe inside a script element, whatever its strings contain.

    >>> as_script("</script>")
    '"\\u003c/script\\u003e"'
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
