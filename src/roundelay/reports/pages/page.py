"""The page: sections, style, script and data in one HTML file that loads nothing from the network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from roundelay import __version__
from roundelay.errors import MissingExtraError
from roundelay.reports.pages import run_charts, tables
from roundelay.reports.pages.charts import Chart, as_script, toned
from roundelay.reports.pages.headline import headline, same_loss
from roundelay.reports.pages.learner_charts import learner_charts, throughput_top
from roundelay.reports.pages.markup import Html, join, tag
from roundelay.reports.pages.run import Run
from roundelay.reports.pages.topology_pictures import topology_pictures
from roundelay.reports.pages.words import word_errors

HERE = Path(__file__).parent


class Page:
    """The page about these runs. It numbers its charts as it writes them; page.js finds the data of a chart by that number."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._charts: list[Chart] = []

    def html(self) -> str:
        """The whole document. Raises MissingExtraError without the 'plots' extra."""
        lead = self._lead()  # before the sections, because charts are numbered in the order of the page
        sections = {name: content for name, content in self._sections() if content}
        title = self._runs[0].name if len(self._runs) == 1 else f"{len(self._runs)} runs"
        said = headline(self._runs)
        sentence = tag("p", said, class_="lede") if said else ""
        body = [
            tag("header", tag("p", "Roundelay report", class_="kind"), tag("h1", title), sentence),
            self._toolbar(list(sections)),
            lead,
            tag(
                "main",
                *(tag("section", tag("h2", name), content, id=name.lower()) for name, content in sections.items()),
            ),
            tag("footer", f"Made by roundelay {__version__}. This file needs no network."),
            tag("script", Html(as_script(self._data())), type="application/json", id="report"),
            tag("script", Html(plotly())),
            tag("script", Html(HERE.joinpath("page.js").read_text())),
        ]
        head = [
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{title} · Roundelay"),
            Html('<link rel="icon" href="data:,">'),
            tag("style", Html(HERE.joinpath("page.css").read_text())),
        ]
        return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"

    def _sections(self) -> Iterator[tuple[str, Html]]:
        runs = self._runs
        yield "Results", tables.results(runs)
        yield "Words", word_errors(runs)
        learning = run_charts.learning(runs, without_loss=same_loss(runs) is not None)
        yield "Learning", self._figures(learning) or tag("p", "No figures yet.", class_="note")
        yield "Speed", join([self._figures(run_charts.speed(runs)) if len(runs) > 1 else "", *self._learners()])
        yield "Agreement", self._figures(run_charts.agreement(runs))
        yield "Sample", tables.samples(runs)
        yield "Events", tables.events(runs) if any(run.events for run in runs) else Html("")
        yield "Topology", topology_pictures(runs)
        yield "Configuration", self._comparison("config", brief=True)
        yield "Machine", self._comparison("machine", brief=False)

    def _lead(self) -> Html:
        """The chart that shows what the first sentence says, if several runs are compared."""
        common = same_loss(self._runs)
        if common is None:
            return Html("")
        chart = run_charts.figure_chart("loss", self._runs)
        return tag("div", self._figure(replace(chart, level=common.loss)), class_="charts lead")

    def _toolbar(self, sections: Sequence[str]) -> Html:
        links = tag("nav", *(tag("a", name, href=f"#{name.lower()}") for name in sections), aria_label="sections")
        choices = [
            tag(
                "label",
                tag("input", type="radio", name="axis", value=value, checked=value == "time"),
                tag("span", value),
            )
            for value in ("time", "samples")
        ]
        axis = tag("fieldset", tag("legend", "against"), *choices, class_="axis")
        shown = [
            tag(
                "label",
                tag("input", type="checkbox", value=index, checked=True),
                tables.swatch(index),
                tag("span", run.name),
            )
            for index, run in enumerate(self._runs)
        ]
        several = tag("div", *shown, class_="runs", role="group", aria_label="runs shown") if len(shown) > 1 else ""
        return tag("div", tag("div", links, axis, class_="row"), several, class_="toolbar")

    def _learners(self) -> Iterator[Html]:
        top = throughput_top(self._runs)
        for index, run in enumerate(self._runs):
            if not run.learners:
                continue
            title = tag("h3", tables.swatch(index), run.name) if len(self._runs) > 1 else ""
            listed = tag("details", tag("summary", "every learner in figures"), tables.learners(run))
            yield tag(
                "div", title, self._figures(learner_charts(run, index, top)), listed, class_="run", data_run=index
            )

    def _figures(self, shown: Sequence[Chart]) -> Html:
        return tag("div", *map(self._figure, shown), class_="charts") if shown else Html("")

    def _figure(self, chart: Chart) -> Html:
        self._charts.append(chart)
        keys = [
            tag("span", tag("i", class_="swatch", style=f"--colour: {toned(name, tone)}"), label)
            for name, tone, label in chart.legend
        ]
        number = len(self._charts) - 1
        return tag(
            "figure",
            tag("figcaption", tag("b", chart.title), tag("span", chart.note, class_="note")),
            tag("label", tag("input", type="checkbox", value=number), tag("span", "log"), class_="log")
            if chart.logarithmic
            else "",
            tag("div", *keys, class_="legend") if keys else "",
            tag("div", class_="plot", data_chart=number, role="img", aria_label=f"{chart.title}. {chart.note}"),
            class_=f"chart {chart.kind}",
        )

    def _comparison(self, what: str, *, brief: bool) -> Html:
        found = [getattr(run, what) for run in self._runs]
        if not any(found):
            return tag("p", f"Not recorded: there is no {what} file in the run.", class_="note")
        table = tables.comparison(found, [run.name for run in self._runs])
        if 'class="differs"' not in table:
            return table
        only = tag(
            "label", tag("input", type="checkbox", checked=brief), tag("span", "only what differs"), class_="only"
        )
        return tag("div", only, table, class_="differences")

    def _data(self) -> dict[str, object]:
        longest = max((run.elapsed_s for run in self._runs if not math.isnan(run.elapsed_s)), default=0.0)
        unit, seconds = ("h", 3600) if longest > 3 * 3600 else ("min", 60) if longest > 3 * 60 else ("s", 1)
        return {
            "unit": unit,
            "seconds": seconds,
            "time": "virtual time" if all(run.simulated for run in self._runs) else "time",
            "marks": run_charts.marks(self._runs),
            "charts": [chart.data() for chart in self._charts],
        }


def plotly() -> str:
    """Source of plotly.js, which the page contains. Raises MissingExtraError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError("a report", "plots") from error
    return str(get_plotlyjs())
