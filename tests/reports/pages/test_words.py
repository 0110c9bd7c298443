"""The report of a speech run that `roundelay evaluate` has scored."""

import json

from roundelay.reports.pages.read_runs import read_runs
from roundelay.reports.pages.run import Run
from roundelay.reports.pages.words import word_errors

FIGURES = {
    "wer": 0.0512,
    "ci95": [0.031, 0.072],
    "words": 551,
    "substitutions": 20,
    "deletions": 5,
    "insertions": 3,
    "features": ["logmel", "fmllr"],
    "wer_by_pass": [0.06, 0.0512],
    "confusions": [["P", "T", 4], ["THE", "*", 2]],
    "by_speaker": {"fash": {"errors": 9, "words": 60}},
    "examples": [{"name": "an1", "said": "P I T", "heard": "T <I> T"}],
}


def test_rate_interval_confusions_speakers_and_examples_are_shown():
    shown = word_errors([Run("first", words={"test": FIGURES}), Run("second")])
    for text in (
        "5.12 %",
        "3.10 % to 7.20 %",
        "551",
        "6.00 %, 5.12 %",
        "logmel + fmllr",
        "(nothing)",
        "fash",
        "15.00 %",
    ):
        assert text in shown
    assert "T &lt;I&gt; T" in shown, "words are escaped"


def test_a_run_that_was_not_evaluated_has_no_section():
    assert word_errors([Run("other")]) == ""


def test_figures_come_from_the_folder_of_the_run(tmp_path):
    (tmp_path / "config.toml").write_text('task = "a:B"\n')
    (tmp_path / "evaluation-test.json").write_text(json.dumps(FIGURES))
    (tmp_path / "evaluation-other.json").write_text("{")
    (run,) = read_runs([tmp_path])
    assert list(run.words) == ["test"]
    assert "5.12 %" in word_errors([run])
