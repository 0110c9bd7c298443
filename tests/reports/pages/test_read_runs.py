"""Runs are read from their folders: unfinished, spread over files, without results; wrong folders are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import SyntheticRun

from roundelay.errors import ConfigError, RoundelayError, UsageError
from roundelay.reports.pages.read_runs import read_runs
from roundelay.reports.pages.run import Run


def learner(samples_seen: float, elapsed_s: float, loss: float = 1.0, rank: int = 0) -> dict[str, object]:
    return {"kind": "learner", "learner": rank, "samples_seen": samples_seen, "elapsed_s": elapsed_s, "loss": loss}


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_metrics_files_of_several_machines_are_one_run_the_earlier_file_first(tmp_path):
    folder = tmp_path / "run"
    write_rows(folder / "metrics-0.jsonl", [learner(30, 3.0, 1.0), learner(40, 4.0, 1.0)])
    write_rows(
        folder / "metrics-1.jsonl", [learner(10, 1.0, 2.0), learner(20, 2.0, 2.0), learner(20, 2.0, 5.0, rank=1)]
    )
    (run,) = read_runs([folder])
    assert run.learners[0]["loss"].tolist() == [2.0, 2.0, 1.0, 1.0]
    assert run.learners[1]["loss"].tolist() == [5.0]
    assert run.samples == 40


def test_an_event_without_a_time_gets_the_time_of_the_row_before_it(tmp_path):
    died = {"kind": "event", "event": "died", "learner": 1, "time": 1.7e9, "reason": "killed by SIGKILL"}
    write_rows(tmp_path / "run" / "metrics.jsonl", [learner(10, 1.5), died, learner(20, 2.5)])
    (run,) = read_runs([tmp_path / "run"])
    assert run.events[0]["elapsed_s"] == 1.5


def test_figures_come_from_the_results_and_without_them_from_the_last_evaluation(tmp_path):
    synthetic = SyntheticRun()
    finished = synthetic.write(tmp_path / "a")
    (finished / "results.json").write_text(json.dumps(synthetic.results() | {"valid": {"loss": 0.125}}))
    stopped = SyntheticRun(finished=False).write(tmp_path / "b")
    first, second = read_runs([finished, stopped])
    assert first.figure("valid", "loss") == 0.125
    assert second.figure("valid", "loss") == synthetic.figures(40)["loss"]
    assert math.isnan(second.figure("test", "loss"))
    assert first.finished
    assert not second.finished


def test_a_half_written_results_file_counts_as_not_finished_and_is_named(tmp_path, caplog):
    folder = SyntheticRun().write(tmp_path / "a")
    (folder / "results.json").write_text('{"finished": tr')
    (run,) = read_runs([folder])
    assert not run.finished
    assert "results.json' cannot be read and is left out: JSONDecodeError" in caplog.text


def test_samples_seen_at_a_time_are_interpolated_from_the_rows(tmp_path):
    run = SyntheticRun()
    (read,) = read_runs([run.write(tmp_path / "a")])
    times = np.array([10.0, 20.0])
    assert read.samples_seen_at(times) == pytest.approx([run.samples_seen(10), run.samples_seen(20)], rel=0.01)
    assert np.isnan(Run("empty").samples_seen_at(times)).all()


def test_the_same_run_twice_is_one_run(tmp_path):
    folder = SyntheticRun().write(tmp_path / "a")
    assert len(read_runs([folder, tmp_path / "a" / ".." / "a"])) == 1


def test_runs_of_the_same_name_are_named_with_their_parent_folder(tmp_path):
    folders = [SyntheticRun().write(tmp_path / parent / "run") for parent in "ab"]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere' is not there; a report needs the folder of a run"):
        read_runs([tmp_path / "nowhere"])


def test_a_file_instead_of_a_folder_is_refused(tmp_path):
    folder = SyntheticRun().write(tmp_path / "a")
    with pytest.raises(UsageError, match=r"metrics.jsonl' is a file"):
        read_runs([folder / "metrics.jsonl"])


def test_a_folder_without_a_run_is_refused_with_the_runs_inside_it(tmp_path):
    with pytest.raises(UsageError, match=r"no run in .*`roundelay train --out` makes one"):
        read_runs([tmp_path])
    SyntheticRun().write(tmp_path / "inside")
    with pytest.raises(UsageError, match=r"did you mean .*inside"):
        read_runs([tmp_path])


def test_a_configuration_that_is_not_toml_is_named(tmp_path):
    folder = SyntheticRun().write(tmp_path / "a")
    (folder / "config.toml").write_text("= 3")
    with pytest.raises(ConfigError, match=r"config.toml' is no TOML"):
        read_runs([folder])


def test_metrics_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RoundelayError, match="cannot read the metrics in"):
        read_runs([tmp_path])


def test_a_line_that_is_not_text_is_left_out_and_the_others_are_read(tmp_path, caplog):
    folder = SyntheticRun().write(tmp_path / "a")
    (whole,) = read_runs([folder])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00\n")
    (run,) = read_runs([folder])
    assert run.figure("valid", "loss") == whole.figure("valid", "loss")
    assert len(run.learners) == len(whole.learners) > 0
    assert "1 of " in caplog.text


def test_lines_that_are_no_rows_are_counted_and_left_out(tmp_path, caplog):
    nonsense = [
        {"kind": "learner", "learner": -1, "samples_seen": 10, "elapsed_s": 1.0},
        {"kind": "learner", "learner": True, "samples_seen": 10, "elapsed_s": 1.0},
        {"kind": "learner", "learner": 1, "samples_seen": "many", "elapsed_s": 1.0},
        {"kind": "evaluation", "samples_seen": 10, "elapsed_s": -5},
        {"kind": "weather"},
        {"learner": 1},
        [1, 2],
    ]
    lines = [json.dumps(row) for row in (learner(10, 1.0), *nonsense)] + ["", "torn {"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run,) = read_runs([tmp_path])
    assert list(run.learners) == [0]
    assert not run.evaluations
    assert not run.events
    assert "8 of 9 lines of the metrics are no rows of a run" in caplog.text


def test_a_whole_run_has_no_line_left_out(tmp_path, caplog):
    read_runs([SyntheticRun().write(tmp_path / "a")])
    assert not caplog.text
