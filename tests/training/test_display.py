from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from roundelay.training import display
from roundelay.training.display import Display
from roundelay.training.metrics import JsonLines


def rows(path, learners=2):
    sink = JsonLines(path)
    for rank in range(learners):
        sink.write(
            {
                "kind": "learner",
                "learner": rank,
                "samples_seen": 500,
                "total": 1000,
                "steps": 31,
                "samples_per_s": 1234.0,
                "loss": 0.25,
                "staleness_mean": 1.5,
                "spread": 0.125,
                "exchanges_per_step": 0.75,
                "wait_s": 0.001,
                "step_s": 0.01,
            }
        )
    sink.write(
        {
            "kind": "evaluation",
            "split": "valid",
            "samples_seen": 500,
            "elapsed_s": 3.0,
            "samples": 9,
            "accuracy": 0.9375,
        }
    )
    sink.close()


def test_a_terminal_shows_a_row_per_learner_and_the_progress(tmp_path):
    out = io.StringIO()
    path = tmp_path / "metrics.jsonl"
    with Display(path, 2, Console(file=out, force_terminal=True, width=100)) as shown:
        rows(path)
        shown.update()
        shown.gone(1, "killed by SIGKILL")
    text = out.getvalue()
    for expected in ("1,234", "0.2500", "1.50", "0.1250", "0.75", "10%", "50%", "accuracy 0.9375", "killed by SIGKILL"):
        assert expected in text


@pytest.mark.parametrize(("width", "shown"), [(100, True), (80, True), (60, False)])
def test_no_heading_is_cut_off_and_no_line_is_so_long_that_an_echoed_ctrl_c_wraps(tmp_path, width, shown):
    out = io.StringIO()
    path = tmp_path / "metrics.jsonl"
    with Display(path, 2, Console(file=out, force_terminal=True, width=width)) as display_:
        rows(path)
        display_.update()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "…" not in text
    assert ("exch./step" in text) == shown
    assert max(len(line) for line in text.splitlines()) <= width - len("^C")


def test_without_a_terminal_there_are_plain_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    out = io.StringIO()
    path = tmp_path / "metrics.jsonl"
    with Display(path, 2, Console(file=out, width=200)) as shown:
        rows(path)
        shown.update()
    assert "mean model after 500 samples, 3 s: valid accuracy 0.9375" in out.getvalue()
    assert "500 of 1,000 samples (50%), 2,468 samples/s, loss 0.2500" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_rows_of_an_earlier_part_of_the_run_are_not_shown_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows(path)
    out = io.StringIO()
    with Display(path, 2, Console(file=out, width=200)) as shown:
        shown.update()
    assert "accuracy" not in out.getvalue()
