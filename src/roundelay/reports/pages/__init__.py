"""One HTML page about one run or several: results, charts, topology, configuration, machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roundelay.errors import UsageError
from roundelay.reports.pages.headline import headline
from roundelay.reports.pages.page import Page
from roundelay.reports.pages.read_runs import read_runs


def write_report(runs: Sequence[Path], out: Path) -> str:
    """Write one self-contained HTML page about the runs in these folders. Returns the sentence that the page begins with.

    Raises UsageError if a folder holds no run or the page cannot be written, MissingExtraError without the 'plots' extra.
    """
    found = read_runs(runs)
    page = Page(found).html()
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write '{out}': {error.strerror}") from error
    return headline(found)
