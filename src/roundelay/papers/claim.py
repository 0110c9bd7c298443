"""What a claim is: a sentence of the papers, an experiment with seeds, and a verdict that only data can give."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Verdict = Literal["reproduced", "not reproduced", "inconclusive"]
Progress = Callable[[float], None]
"""Told the part of the experiment that is done, between 0 and 1."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and where Student's t says that it lies with 95 % confidence.

    >>> Interval.of([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.48..., high=4.48...)
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """From one value a seed; nothing is known from a single one."""
        from scipy import stats

        mean = float(np.mean(values))
        if len(values) < 2 or not math.isfinite(mean):
            return cls(mean, -math.inf, math.inf)
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
        return cls(mean, mean - half, mean + half)

    @classmethod
    def of_ratios(cls, values: Sequence[float]) -> Interval:
        """Ratios multiply, so their mean and interval are taken of their logarithms.

        >>> Interval.of_ratios([0.5, 1.0, 2.0])
        Interval(mean=1.0, low=0.17..., high=5.59...)
        """
        logs = cls.of([math.log(value) for value in values])
        return cls(*(math.exp(min(value, 700.0)) for value in (logs.mean, logs.low, logs.high)))

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Line:
    """One line of a plot: y over x, one row of `ys` a seed; a prediction is dashed, in the colour of what it stands beside."""

    label: str
    x: Sequence[float]
    ys: Sequence[Sequence[float]]
    dashed: bool = False
    beside: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `log` names the logarithmic ones: "", "x", "y" or "xy"."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    log: str = ""


@dataclass(frozen=True)
class Finding:
    """What an experiment found.

    Attributes:
        verdict: from the figures alone.
        sentence: what was found and, where the claim fails, why.
        figures: numbers and intervals by name.
        panels: the plot.
    """

    verdict: Verdict
    sentence: str
    figures: dict[str, Interval | float | str]
    panels: Sequence[Panel] = ()


@dataclass(frozen=True)
class Claim:
    """A sentence of the papers and the experiment that tests it.

    Attributes:
        name: on the command line.
        sentence: what is claimed.
        setting: what the experiment does.
        differs: how that differs from the papers' setting.
        experiment: (seeds, progress) -> what was found.
    """

    name: str
    sentence: str
    setting: str
    differs: str
    experiment: Callable[[Sequence[int], Progress], Finding] = field(repr=False)

    def document(self, finding: Finding, seeds: Sequence[int], cpu_s: float) -> dict[str, Any]:
        """As it is written and printed."""
        figures = {
            name: vars(value) if isinstance(value, Interval) else value for name, value in finding.figures.items()
        }
        return {
            "name": self.name,
            "claim": self.sentence,
            "verdict": finding.verdict,
            "found": finding.sentence,
            "figures": _finite(figures),
            "setting": self.setting,
            "differs": self.differs,
            "seeds": list(seeds),
            "cpu_s": round(cpu_s, 1),
        }


def _finite(value: Any) -> Any:  # noqa: ANN401
    """JSON knows no infinity: what is unbounded is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def judged(*, holds: bool, fails: bool) -> Verdict:
    """`holds` and `fails` are two statements about data; neither of them is no verdict."""
    assert not (holds and fails)
    return "reproduced" if holds else "not reproduced" if fails else "inconclusive"
