"""What a claim is: a sentence of the papers, an experiment with seeds, and a verdict that a rule draws from its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from roundelay.errors import MissingExtraError

Verdict = Literal["reproduced", "not reproduced", "inconclusive"]
Progress = Callable[[float], None]
"""Called with the finished share of the experiment, between 0 and 1."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % confidence interval by Student's t.

    >>> Interval.of([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.48..., high=4.48...)
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """The interval from one value per seed; from a single value it is unbounded.

        Raises MissingExtraError if scipy is not installed.
        """
        try:
            from scipy import stats
        except ImportError as error:
            raise MissingExtraError("a confidence interval", "analysis") from error
        mean = float(np.mean(values))
        if len(values) < 2 or not math.isfinite(mean):
            return cls(mean, -math.inf, math.inf)
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
        return cls(mean, mean - half, mean + half)

    @classmethod
    def of_ratios(cls, values: Sequence[float]) -> Interval:
        """The interval of ratios: their geometric mean, with the interval taken on their logarithms.

        >>> Interval.of_ratios([0.5, 1.0, 2.0])
        Interval(mean=1.0, low=0.17..., high=5.59...)
        """
        logs = cls.of([math.log(value) for value in values])
        return cls(*(math.exp(min(value, 700.0)) for value in (logs.mean, logs.low, logs.high)))

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


Figures = dict[str, Interval | float]


@dataclass(frozen=True)
class Line:
    """One line of a plot: y over x, with one row of `ys` for each seed.

    A prediction is `dashed`; `beside` is the label of the measured line that it predicts. Both have the same colour.
    """

    label: str
    x: Sequence[float]
    ys: Sequence[Sequence[float]]
    dashed: bool = False
    beside: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `log` names the logarithmic axes: "", "x", "y" or "xy"."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    log: str = ""


@dataclass(frozen=True)
class Finding:
    """The result of an experiment.

    Attributes:
        verdict: follows from the figures alone.
        sentence: what was found and, if the claim fails, why.
        figures: numbers and intervals by name.
        panels: the plot.
    """

    verdict: Verdict
    sentence: str
    figures: Figures
    panels: Sequence[Panel] = ()


@dataclass(frozen=True)
class Claim:
    """A sentence of the papers and the experiment that tests it.

    Attributes:
        name: its name on the command line.
        sentence: what the papers claim.
        setting: what the experiment does.
        differs: how the setting differs from that of the papers.
        seed_s: about how many seconds one seed takes on one core of our machine.
        experiment: (seeds, progress) -> the finding.
        check: called before the experiment of any claim begins; raises what this one would raise if something is missing.
    """

    name: str
    sentence: str
    setting: str
    differs: str
    seed_s: float
    experiment: Callable[[Sequence[int], Progress], Finding] = field(repr=False)
    check: Callable[[], object] = field(default=lambda: None, repr=False)

    def document(self, finding: Finding, seeds: Sequence[int], cpu_s: float) -> dict[str, Any]:
        """The claim and its finding as a dictionary that can be written as JSON."""
        figures = {
            name: vars(value) if isinstance(value, Interval) else value for name, value in finding.figures.items()
        }
        return {
            "name": self.name,
            "claim": self.sentence,
            "verdict": finding.verdict,
            "found": finding.sentence,
            "figures": _without_infinities(figures),
            "setting": self.setting,
            "differs": self.differs,
            "seeds": list(seeds),
            "cpu_s": round(cpu_s, 1),
        }


def _without_infinities(value: Any) -> Any:  # noqa: ANN401
    """JSON has no infinity and no NaN, so they become null."""
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdict_from(*, holds: bool, fails: bool) -> Verdict:
    """The verdict from two statements about the data; if neither is true, the data do not decide."""
    assert not (holds and fails)
    return "reproduced" if holds else "not reproduced" if fails else "inconclusive"
