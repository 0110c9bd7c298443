"""`roundelay report`: mistakes are one line, and the page is where it was asked for."""

from __future__ import annotations

import argparse

import pytest
from synthetic_runs import SyntheticRun

from roundelay.cli import report
from roundelay.errors import UsageError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command in an empty folder; gives back the arguments."""
    monkeypatch.chdir(tmp_path)

    def started(*words: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser(exit_on_error=False)
        report.add_arguments(parser)
        args = parser.parse_args(words)
        report.run(args)
        return args

    return started


def test_the_page_is_written_where_it_was_asked_for_and_it_says_where(run, tmp_path, capsys):
    SyntheticRun().write(tmp_path / "a")
    SyntheticRun("dpsgd").write(tmp_path / "b")
    run("a", "b", "--out", "both.html")
    assert capsys.readouterr().out == "report: both.html\n"
    page = (tmp_path / "both.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "plotly.js" in page


def test_without_a_name_the_page_is_report_html(run, tmp_path):
    SyntheticRun().write(tmp_path / "a")
    run("a")
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a", "--out", "report.pdf"], "needs a file name that ends in .html, got 'report.pdf'"),
        (["a", "--out", "no/report.html"], "there is no folder 'no'; make it first"),
    ],
)
def test_a_page_that_cannot_be_is_refused_before_anything_is_read(run, words, told):
    with pytest.raises(argparse.ArgumentError, match=told):
        run(*words)


def test_a_folder_without_a_run_is_told_and_no_page_is_left(run, tmp_path):
    with pytest.raises(UsageError, match="'a' is not there"):
        run("a")
    assert not (tmp_path / "report.html").exists()
