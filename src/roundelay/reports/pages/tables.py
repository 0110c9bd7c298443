"""The tables of a report: results, learners, events, and what runs have in common or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from roundelay.reports.pages.charts import colour
from roundelay.reports.pages.curves import describe
from roundelay.reports.pages.markup import Html, join, tag
from roundelay.reports.pages.runs import SPLITS, Run
from roundelay.reports.pages.tracks import number

MOST_LISTED = 256  # learners, and events
NOTHING = "–"
LESS_IS_BETTER = {"loss", "wer", "cer", "per", "error", "perplexity"}
MORE_IS_BETTER = {"accuracy", "top1", "top5"}


def results(runs: Sequence[Run]) -> Html:
    """One row a run; the best of a figure is marked where it is known which is better."""
    columns = [(split, name) for split in SPLITS for name in _figures(runs, split)]
    best = {column: _best([run.figure(*column) for run in runs], column[1]) for column in columns}
    heads = ["run", "strategy", "topology", "learners", "state", "time", "samples", "samples/s"]
    heads += [f"{split} {name}" for split, name in columns]
    rows = [
        tag(
            "tr",
            tag("th", swatch(index), run.name, scope="row"),
            *(tag("td", text) for text in (said(run.config.get("strategy")), averages_over(run))),
            _cell(number(run.size), count),
            tag("td", state(run), class_=None if run.finished else "unfinished"),
            _cell(run.elapsed_s, duration),
            _cell(run.samples, count),
            _cell(_rate(run), figure),
            *(_cell(run.figure(*column), figure, best=run.figure(*column) == best[column]) for column in columns),
        )
        for index, run in enumerate(runs)
    ]
    return table(heads, rows, class_="results")


def _figures(runs: Sequence[Run], split: str) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.figures)
    return [name for name in names if any(not math.isnan(run.figure(split, name)) for run in runs)]


def _best(values: Sequence[float], name: str) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2 or name not in LESS_IS_BETTER | MORE_IS_BETTER:
        return None
    return min(known) if name in LESS_IS_BETTER else max(known)


def _rate(run: Run) -> float:
    return run.samples / run.elapsed_s if run.elapsed_s > 0 else math.nan


def _cell(value: float, shown: Callable[[float], str], *, best: bool = False) -> Html:
    """A number as it is read, with all its digits for those who point at it."""
    if math.isnan(value):
        return tag("td", NOTHING, class_="number")
    return tag(
        "td", shown(value), class_="number best" if best else "number", data_value=repr(value), title=f"{value:.10g}"
    )


def learners(run: Run) -> Html:
    """One row a learner, with what it told last."""
    happened = {
        event["learner"]: describe({"event": event.get("event")})
        for event in run.events
        if isinstance(event.get("learner"), int)
    }
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "steps": ("steps", count),
        "samples": ("samples", count),
        "samples/s": ("samples_per_s", figure),
        "loss": ("loss", figure),
        "exchanges a step": ("exchanges_per_step", figure),
        "staleness": ("staleness_mean", figure),
        "skipped": ("skipped", count),
        "last heard": ("elapsed_s", duration),
    }
    known = {
        head: each for head, each in columns.items() if any(each[0] in track.last for track in run.learners.values())
    }
    rows = [
        tag(
            "tr",
            tag("th", str(learner), scope="row"),
            *(_cell(number(track.last.get(name)), shown) for name, shown in known.values()),
            *([tag("td", happened.get(learner, ""))] if happened else []),
        )
        for learner, track in list(run.learners.items())[:MOST_LISTED]
    ]
    heads = ["learner", *known, *(["last event"] if happened else [])]
    return join([table(heads, rows), _left_out(len(run.learners), "learners")])


def events(runs: Sequence[Run]) -> Html:
    """What happened, by time."""
    found = sorted(
        ((index, event) for index, run in enumerate(runs) for event in run.events),
        key=lambda each: _time_of(each[1]),
    )
    rows = [
        tag(
            "tr",
            _cell(number(event.get("elapsed_s")), duration),
            *([tag("td", swatch(index), runs[index].name)] if len(runs) > 1 else []),
            tag("td", said(event.get("event"))),
            tag("td", said(event.get("learner")), class_="number"),
            tag("td", said(event.get("reason", ""))),
        )
        for index, event in found[:MOST_LISTED]
    ]
    heads = ["time", *(["run"] if len(runs) > 1 else []), "event", "learner", "reason"]
    return join([table(heads, rows, class_="events"), _left_out(len(found), "events")])


def _time_of(event: Mapping[str, Any]) -> float:
    time = number(event.get("elapsed_s"))
    return math.inf if math.isnan(time) else time


def _left_out(total: int, what: str) -> Html:
    more = total - MOST_LISTED
    return tag("p", f"and {more:,} more {what}", class_="note") if more > 0 else Html("")


def comparison(tables: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> Html:
    """Keys down, runs across; where runs differ the row is marked. Runs that agree in everything share a column."""
    flat = [dict(flattened(each)) for each in tables]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    same = all(each == flat[0] for each in flat)
    shown, heads = (flat[:1], ["all runs" if len(flat) > 1 else ""]) if same else (flat, list(titles))
    rows = []
    for key in keys:
        values = [said(each.get(key)) for each in shown]
        differs = len(set(values)) > 1
        cells = [tag("td", tag("code", value)) for value in values]
        rows.append(tag("tr", tag("th", key, scope="row"), *cells, class_="differs" if differs else None))
    return table(["", *heads] if any(heads) else [], rows, class_="comparison" if any(heads) else "comparison single")


def flattened(nested: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, plain ones first.

    >>> dict(flattened({"data": {"batch": 8}, "seed": 1}))
    {'seed': 1, 'data.batch': 8}
    """
    for key, value in nested.items():
        if not isinstance(value, Mapping):
            yield path + key, value
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{path}{key}.")


def table(heads: Sequence[str], rows: Sequence[str], class_: str | None = None) -> Html:
    """A table that scrolls by itself where it is too wide."""
    head = tag("thead", tag("tr", *(tag("th", each, scope="col") for each in heads))) if heads else Html("")
    return tag("div", tag("table", head, tag("tbody", *rows), class_=class_), class_="scroll", tabindex=0)


def swatch(index: int) -> Html:
    """The colour of a run."""
    return tag("i", class_="swatch", style=f"--colour: var(--{colour(index)})")


def state(run: Run) -> str:
    """Whether a run has come to its end."""
    if run.finished:
        return "finished"
    if math.isnan(run.elapsed_s):
        return "no figures yet"
    part = "" if math.isnan(run.progress) else f"{run.progress:.0%} of its budget, "
    return f"not finished: {part}last heard after {duration(run.elapsed_s)}"


def averages_over(run: Run) -> str:
    """With whom learners average."""
    if run.config.get("strategy") not in ("adpsgd", "dpsgd"):
        return "everyone" if run.config.get("strategy") else NOTHING
    return said(run.config.get("topology"))


def said(value: object) -> str:
    """A value as a configuration writes it."""
    if value is None:
        return NOTHING
    if isinstance(value, list):
        return ", ".join(map(said, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def figure(value: float) -> str:
    """Four digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def count(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """A time as one says it.

    >>> duration(4.21), duration(125), duration(7500)
    ('4.2 s', '2 min 5 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
