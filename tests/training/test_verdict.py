"""What the last lines on the terminal say, and the exit code, by how the learners ended."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from roundelay.training.verdict import Ending

TRACEBACK = 'Traceback (most recent call last):\n  File "mine.py", line 4, in loss\n'


@pytest.fixture
def ending(tmp_path):
    """Four learners that were asked to stop, and did."""
    return Ending(tmp_path, "roundelay train --out run --resume", signal.SIGINT, "", {}, learners=4, joined=False)


def test_after_ctrl_c_the_command_that_resumes_is_the_last_line(ending):
    said, code = ending.verdict()
    assert said == "stopped and saved; go on with:\n  roundelay train --out run --resume\n"
    assert code == 130


def test_problems_with_the_data_are_counted_by_kind(ending, tmp_path):
    (tmp_path / "results.json").write_text('{"valid": {}, "test": {}, "elapsed_s": 1.0}')
    (tmp_path / "problems.txt").write_text("unknown words: u1: zebra\nunknown words: u2: gnu\nclipped: u3\n")
    said, code = ending.verdict()
    assert "problems with the data: 2 × unknown words, 1 × clipped; one line each: " in said
    assert code == 0


def test_a_learner_lost_before_ctrl_c_does_not_make_the_stop_an_error(ending):
    lost = {2: "killed by SIGKILL"}
    said, code = replace(ending, failed=lost, lost_before_stop=frozenset(lost)).verdict()
    assert said.splitlines()[:2] == ["learner 2 was lost before (killed by SIGKILL)", "stopped and saved; go on with:"]
    assert "error" not in said
    assert code == 130


@pytest.mark.parametrize(
    ("failed", "before"),
    [({1: "exit code 1"}, ()), ({2: "killed", 1: "exit code 1"}, (2,)), (dict.fromkeys(range(4), "x"), range(4))],
)
def test_a_learner_that_fails_while_it_saves_or_all_lost_is_an_error(ending, failed, before):
    said, code = replace(ending, failed=failed, lost_before_stop=frozenset(before)).verdict()
    assert "error: the run ended early" in said
    assert code == 130


def test_without_a_signal_a_lost_learner_is_named(ending):
    said, code = replace(ending, signal=None, failed={3: "exit code 2: no space"}).verdict()
    assert "the run ended early: learner 3 was lost first (exit code 2: no space)" in said
    assert code == 1


def test_a_finished_run_shows_its_figures_and_the_text_that_the_model_writes(ending, tmp_path):
    results = {"valid": {"loss": 1.5}, "test": {"loss": 2.0}, "sample": "\nTo be,\nor not", "elapsed_s": 7.0}
    (tmp_path / "results.json").write_text(json.dumps(results))
    said, code = replace(ending, signal=None).verdict()
    assert "valid: loss 1.5000\nmean model, test: loss 2.0000\nthe mean model writes:\n\nTo be,\nor not\n\n" in said
    assert said.splitlines()[-1].startswith("finished in 7.0 s")
    assert code == 0


@pytest.mark.parametrize("way", ["exit code 1: KeyboardInterrupt", "killed by SIGINT"])
def test_ctrl_c_before_training_began_is_no_error_and_says_whether_there_is_a_checkpoint(ending, tmp_path, way):
    early = replace(ending, failed=dict.fromkeys("0123", way))
    assert early.verdict() == ("stopped before training began; nothing was saved\n", 130)
    (tmp_path / "checkpoints" / "100").mkdir(parents=True)
    (tmp_path / "checkpoints" / "100" / "manifest.json").touch()
    said, _ = early.verdict()
    assert said == f"stopped before training began; go on from the last checkpoint with:\n  {ending.command}\n"


def test_after_a_second_ctrl_c_there_is_one_line_and_no_traceback_of_a_learner_that_was_killed(ending, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner-0.log").write_text(f"{TRACEBACK}KeyboardInterrupt\n")
    failed = {"0": "killed by SIGKILL", "1": "exit code 1: KeyboardInterrupt"}
    killed = replace(ending, failed=failed, killed=True)
    assert killed.verdict() == ("killed; nothing was saved\n", 130)
    (tmp_path / "checkpoints" / "100").mkdir(parents=True)
    (tmp_path / "checkpoints" / "100" / "manifest.json").touch()
    assert killed.verdict() == (f"killed; go on from the last checkpoint with:\n  {ending.command}\n", 130)


def test_a_mistake_that_all_learners_find_is_told_once_without_what_their_logs_say_else(ending, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner-1.log").write_text("learner 1 of 4 is here\nroundelay: error: too large\n")
    said, _ = replace(ending, signal=None, failed=dict.fromkeys("1023", "exit code 2: too large")).verdict()
    assert said.startswith(
        "roundelay: error: the run ended early: all learners failed in the same way: exit code 2: too large;"
    )


def test_the_traceback_of_the_first_learner_that_was_lost_comes_first_and_once(ending, tmp_path):
    (tmp_path / "logs").mkdir()
    for learner in "13":
        (tmp_path / "logs" / f"learner-{learner}.log").write_text(
            f"begins\n{TRACEBACK}ZeroDivisionError: of {learner}\n"
        )
    failed = dict.fromkeys("13", "exit code 1: ZeroDivisionError")
    said, _ = replace(ending, signal=None, failed=failed).verdict()
    assert said.startswith(f"{TRACEBACK}ZeroDivisionError: of 1\nroundelay: error: the run ended early: learner 1")
    assert said.count("Traceback") == 1
