"""`roundelay report` writes the page where `--out` says, and refuses paths that cannot work."""

from __future__ import annotations

import argparse

import pytest
from synthetic_runs import SyntheticRun

from roundelay.cli import report
from roundelay.errors import UsageError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def started(*words: str) -> None:
        parser = argparse.ArgumentParser(exit_on_error=False)
        report.add_arguments(parser)
        report.run(parser.parse_args(words))

    return started


def test_the_page_is_written_to_out_and_its_path_is_printed(run, tmp_path, capsys):
    SyntheticRun().write(tmp_path / "a")
    SyntheticRun("dpsgd").write(tmp_path / "b")
    run("a", "b", "--out", "both.html")
    sentence, path = capsys.readouterr().out.splitlines()
    assert sentence.startswith("a 40.0 s, b 40.0 s to the same validation loss")
    assert path == "report: both.html"
    page = (tmp_path / "both.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "plotly.js" in page


def test_without_out_the_page_is_report_html(run, tmp_path):
    SyntheticRun().write(tmp_path / "a")
    run("a")
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--out", "report.pdf"], "needs a file name that ends in .html, .htm, got 'report.pdf'"),
        (["a", "--out", "no/report.html"], "there is no folder 'no'; make it first"),
    ],
)
def test_a_path_that_cannot_work_is_refused_before_any_run_is_read(run, words, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        run(*words)


def test_a_missing_run_is_refused_and_no_page_is_written(run, tmp_path):
    with pytest.raises(UsageError, match="'a' is not there"):
        run("a")
    assert not (tmp_path / "report.html").exists()
