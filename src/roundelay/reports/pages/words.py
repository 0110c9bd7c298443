"""Word errors of speech runs: the rate with its interval, confused words, errors by speaker, and what was said and heard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roundelay.reports.pages.formats import MISSING
from roundelay.reports.pages.markup import Html, join, tag
from roundelay.reports.pages.run import Run
from roundelay.reports.pages.tables import swatch, table

NO_WORD = "*"  # in a pair of words: nothing was said, or nothing was heard


def word_errors(runs: Sequence[Run]) -> Html:
    """A table of all evaluations, and the details of each. Empty if `roundelay evaluate` has not scored any of the runs."""
    found = [(index, run, name) for index, run in enumerate(runs) for name in run.words]
    if not found:
        return Html("")
    rows = [_row(index, run, name, run.words[name]) for index, run, name in found]
    heads = ["run", "data", "WER", "95 % interval", "words", "sub", "del", "ins", "WER of each pass", "features"]
    return join([table(heads, rows), *(_details(run.name, name, run.words[name]) for _, run, name in found)])


def _row(index: int, run: Run, name: str, figures: Mapping[str, Any]) -> Html:
    low, high = figures.get("ci95", (None, None))
    by_pass = ", ".join(map(_percent, figures.get("wer_by_pass", ())))
    texts = [_percent(figures["wer"]), MISSING if low is None else f"{_percent(low)} to {_percent(high)}"]
    texts += [str(figures.get(key, MISSING)) for key in ("words", "substitutions", "deletions", "insertions")]
    return tag(
        "tr",
        tag("th", swatch(index), run.name, scope="row"),
        tag("td", name),
        *(tag("td", text, class_="number") for text in texts),
        tag("td", by_pass or MISSING),
        tag("td", " + ".join(figures.get("features", ())) or MISSING),
    )


def _details(run: str, name: str, figures: Mapping[str, Any]) -> Html:
    confused = [[_word(said), _word(heard), str(count)] for said, heard, count in figures.get("confusions", ())]
    speakers = [
        [speaker, str(each["errors"]), str(each["words"]), _percent(each["errors"] / max(each["words"], 1))]
        for speaker, each in figures.get("by_speaker", {}).items()
    ]
    said = [[each["name"], each["said"], each["heard"]] for each in figures.get("examples", ())]
    return tag(
        "details",
        tag("summary", f"{run}, {name}: confused words, errors by speaker, said and heard"),
        _section("Most frequent errors", ["said", "heard", "times"], confused),
        _section("Errors by speaker", ["speaker", "errors", "words", "WER"], speakers),
        _section("Utterances with errors", ["utterance", "said", "heard"], said),
    )


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    if not rows:
        return Html("")
    return join([tag("h3", title), table(heads, [tag("tr", *(tag("td", text) for text in row)) for row in rows])])


def _word(text: str) -> str:
    return "(nothing)" if text == NO_WORD else text


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
