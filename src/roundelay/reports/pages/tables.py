"""Tables of a report: results, learners, events, and a comparison of configurations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from roundelay.reports.pages.charts import colour
from roundelay.reports.pages.formats import MISSING, config_value, count, duration, figure
from roundelay.reports.pages.headline import SameLoss, same_loss
from roundelay.reports.pages.markup import Html, join, tag
from roundelay.reports.pages.run import SPLITS, Run
from roundelay.reports.pages.time_series import number
from roundelay.reports.pages.topology_pictures import has_topology

MOST_LISTED = 256  # learners, and events
LESS_IS_BETTER = {"loss", "wer", "cer", "per", "error", "perplexity"}
MORE_IS_BETTER = {"accuracy", "top1", "top5"}
# Heading, column of a learner's last row, and how the value is shown.
LEARNER_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "steps": ("steps", count),
    "samples": ("samples", count),
    "samples/s": ("samples_per_s", figure),
    "loss": ("loss", figure),
    "exchanges per step": ("exchanges_per_step", figure),
    "staleness": ("staleness_mean", figure),
    "skipped": ("skipped", count),
    "last row": ("elapsed_s", duration),
}


def results(runs: Sequence[Run]) -> Html:
    """One row per run. The best value of a figure is marked if it is known whether less or more is better."""
    columns = [(split, name) for split in SPLITS for name in _figures(runs, split)]
    best = {column: _best([run.figure(*column) for run in runs], column[1]) for column in columns}
    common = same_loss(runs)
    heads = ["run", "strategy", "topology", "learners", "state", "time", "samples", "samples/s"]
    heads += [f"time to loss {figure(common.loss)}"] if common else []
    heads += [f"{split} {name}" for split, name in columns]
    rows = [
        tag(
            "tr",
            tag("th", swatch(index), run.name, scope="row"),
            *(tag("td", text) for text in (config_value(run.config.get("strategy")), _topology(run))),
            _cell(number(run.size), count),
            tag("td", run.state, class_=None if run.finished else "unfinished"),
            _cell(run.elapsed_s, duration),
            _cell(run.samples, count),
            _cell(run.samples / run.elapsed_s if run.elapsed_s > 0 else math.nan, figure),
            *([_time_to(common, index)] if common else []),
            *(
                _cell(run.figure(*column), figure, best=figure(run.figure(*column)) == best[column])
                for column in columns
            ),
        )
        for index, run in enumerate(runs)
    ]
    return table(heads, rows, class_="results")


def _time_to(common: SameLoss, index: int) -> Html:
    seconds = common.seconds[index]
    return _cell(seconds, lambda _: common.told(index), best=seconds == min(common.seconds))


def _figures(runs: Sequence[Run], split: str) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.figures)
    return [name for name in names if any(not math.isnan(run.figure(split, name)) for run in runs)]


def _best(values: Sequence[float], name: str) -> str | None:
    """The best value as the table shows it: values that look equal are marked together."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2 or name not in LESS_IS_BETTER | MORE_IS_BETTER:
        return None
    return figure(min(known) if name in LESS_IS_BETTER else max(known))


def _topology(run: Run) -> str:
    if run.config.get("strategy") is None:
        return MISSING
    return config_value(run.config.get("topology")) if has_topology(run) else "all learners"


def learners(run: Run) -> Html:
    """One row per learner, with the values of its last row of metrics."""
    last_events = {
        event["learner"]: str(event.get("event", "event"))
        for event in run.events
        if isinstance(event.get("learner"), int)
    }
    columns = {
        head: (name, shown)
        for head, (name, shown) in LEARNER_COLUMNS.items()
        if any(name in series.last for series in run.learners.values())
    }
    rows = [
        tag(
            "tr",
            tag("th", str(learner), scope="row"),
            *(_cell(number(series.last.get(name)), shown) for name, shown in columns.values()),
            *([tag("td", last_events.get(learner, ""))] if last_events else []),
        )
        for learner, series in list(run.learners.items())[:MOST_LISTED]
    ]
    heads = ["learner", *columns, *(["last event"] if last_events else [])]
    return join([table(heads, rows), _left_out(len(run.learners), "learners")])


def events(runs: Sequence[Run]) -> Html:
    """The events of all runs, by time; an event without a time comes last."""
    found = [(index, event) for index, run in enumerate(runs) for event in run.events]
    found.sort(key=lambda each: _sort_time(each[1]))
    rows = [
        tag(
            "tr",
            _cell(number(event.get("elapsed_s")), duration),
            *([tag("td", swatch(index), runs[index].name)] if len(runs) > 1 else []),
            tag("td", config_value(event.get("event"))),
            tag("td", config_value(event.get("learner")), class_="number"),
            tag("td", config_value(event.get("reason", ""))),
        )
        for index, event in found[:MOST_LISTED]
    ]
    heads = ["time", *(["run"] if len(runs) > 1 else []), "event", "learner", "reason"]
    return join([table(heads, rows, class_="events"), _left_out(len(found), "events")])


def _sort_time(event: Mapping[str, Any]) -> float:
    time = number(event.get("elapsed_s"))
    return math.inf if math.isnan(time) else time


def comparison(configs: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> Html:
    """One row per key, one column per run; rows that differ are marked. Equal runs share one column."""
    flat = [dict(flattened(each)) for each in configs]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    same = all(each == flat[0] for each in flat)
    shown, heads = (flat[:1], ["all runs" if len(flat) > 1 else ""]) if same else (flat, list(titles))
    rows = []
    for key in keys:
        values = [config_value(each.get(key)) for each in shown]
        differs = len(set(values)) > 1
        cells = [tag("td", tag("code", value)) for value in values]
        rows.append(tag("tr", tag("th", key, scope="row"), *cells, class_="differs" if differs else None))
    return table(["", *heads] if any(heads) else [], rows, class_="comparison" if any(heads) else "comparison single")


def flattened(nested: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; at each level plain values come before sections.

    >>> dict(flattened({"data": {"batch": 8}, "seed": 1}))
    {'seed': 1, 'data.batch': 8}
    """
    for key, value in nested.items():
        if not isinstance(value, Mapping):
            yield path + key, value
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{path}{key}.")


def swatch(index: int) -> Html:
    """A dot in the colour of the run with this index."""
    return tag("i", class_="swatch", style=f"--colour: var(--{colour(index)})")


def samples(runs: Sequence[Run]) -> Html:
    """A text that the mean model of each run has written, if the task is a language."""
    texts = [(index, run) for index, run in enumerate(runs) if isinstance(run.results.get("sample"), str)]
    return join(
        tag("figure", tag("figcaption", swatch(index), run.name), tag("pre", run.results["sample"]))
        for index, run in texts
    )


def table(heads: Sequence[str], rows: Sequence[str], class_: str | None = None) -> Html:
    """A table in an element that scrolls sideways if the table is too wide."""
    head = tag("thead", tag("tr", *(tag("th", each, scope="col") for each in heads))) if heads else Html("")
    return tag("div", tag("table", head, tag("tbody", *rows), class_=class_), class_="scroll", tabindex=0)


def _cell(value: float, shown: Callable[[float], str], *, best: bool = False) -> Html:
    """A number in short form; the tooltip has ten digits."""
    if math.isnan(value):
        return tag("td", MISSING, class_="number")
    return tag(
        "td", shown(value), class_="number best" if best else "number", data_value=repr(value), title=f"{value:.10g}"
    )


def _left_out(total: int, what: str) -> Html:
    more = total - MOST_LISTED
    return tag("p", f"and {more:,} more {what}", class_="note") if more > 0 else Html("")
