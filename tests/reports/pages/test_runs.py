"""Runs as reports read them: resumed, cut off, spread over files; wrong folders are told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import SyntheticRun

from roundelay.errors import ConfigError, RoundelayError, UsageError
from roundelay.reports.pages.runs import Run, read_runs
from roundelay.reports.pages.tracks import Track, grid, on_grid, thinned


def learner(samples_seen: float, elapsed_s: float, loss: float = 1.0, rank: int = 0) -> dict[str, object]:
    return {"kind": "learner", "learner": rank, "samples_seen": samples_seen, "elapsed_s": elapsed_s, "loss": loss}


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def track(*rows: dict[str, object]) -> Track:
    made = Track()
    for row in rows:
        made.add(row)
    return made


def test_rows_after_the_checkpoint_that_a_run_was_resumed_from_are_taken_back():
    resumed = track(learner(10, 1.0, 3.0), learner(20, 2.0, 2.0), learner(30, 3.0, 9.0), learner(25, 2.5, 1.0))
    assert resumed["samples_seen"].tolist() == [10, 20, 25]
    assert resumed["loss"].tolist() == [3.0, 2.0, 1.0]
    assert resumed["elapsed_s"].tolist() == [1.0, 2.0, 2.5]


def test_a_clock_that_began_anew_goes_on_from_the_row_before():
    resumed = track(learner(10, 1.0), learner(20, 2.0), learner(15, 0.5), learner(25, 1.5))
    assert resumed["elapsed_s"].tolist() == [1.0, 1.0, 2.0]


def test_what_a_row_lacks_is_nan_and_a_row_without_time_or_samples_seen_is_left_out():
    some = track(
        learner(1, 1.0),
        {"samples_seen": 2, "elapsed_s": 2.0, "wer": 0.5},
        {"samples_seen": 3},
        {"samples_seen": "x", "elapsed_s": 1},
    )
    assert len(some) == 2
    assert math.isnan(some["loss"][1])
    assert math.isnan(some["wer"][0])
    assert "nothing" not in some
    assert np.isnan(some["nothing"]).all()


def test_thinned_values_keep_the_mean():
    values = np.arange(1000.0)
    assert len(thinned(values, 100)) == 100
    assert thinned(values, 100).mean() == pytest.approx(values.mean())


def test_on_a_grid_a_learner_is_silent_after_its_death_and_holds_its_value_until_the_next_row_is_due():
    alive = track(*(learner(k, float(k), 1.0) for k in range(11)))
    dead = track(*(learner(k, float(k), 2.0) for k in range(6)))
    times = grid([alive, dead])
    assert times.tolist() == list(range(11))
    values = on_grid([alive, dead], "loss", times)
    assert values[0].tolist() == [1.0] * 11
    assert values[1][:7].tolist() == [2.0] * 7
    assert np.isnan(values[1][7:]).all()


def test_learners_of_a_run_so_short_that_each_told_once_are_all_counted():
    once = [track(learner(10, 1.0 + 0.01 * rank, 1.0, rank)) for rank in range(4)]
    assert on_grid(once, "loss", grid(once)).tolist() == [[1.0]] * 4


def test_files_of_several_machines_are_one_run_and_the_earlier_begins(tmp_path):
    folder = tmp_path / "run"
    write_rows(folder / "metrics-0.jsonl", [learner(30, 3.0, 1.0), learner(40, 4.0, 1.0)])
    write_rows(
        folder / "metrics-1.jsonl", [learner(10, 1.0, 2.0), learner(20, 2.0, 2.0), learner(20, 2.0, 5.0, rank=1)]
    )
    (run,) = read_runs([folder])
    assert run.learners[0]["loss"].tolist() == [2.0, 2.0, 1.0, 1.0]
    assert run.learners[1]["loss"].tolist() == [5.0]
    assert run.samples == 40


def test_an_event_without_a_time_has_that_of_the_row_before_it(tmp_path):
    died = {"kind": "event", "event": "died", "learner": 1, "time": 1.7e9, "reason": "killed by SIGKILL"}
    write_rows(tmp_path / "run" / "metrics.jsonl", [learner(10, 1.5), died, learner(20, 2.5)])
    (run,) = read_runs([tmp_path / "run"])
    assert run.events[0]["elapsed_s"] == 1.5


def test_a_finished_run_is_judged_by_its_results_and_another_by_its_last_evaluation(tmp_path):
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


def test_a_torn_results_file_is_a_run_that_has_not_finished(tmp_path):
    folder = SyntheticRun().write(tmp_path / "a")
    (folder / "results.json").write_text('{"finished": tr')
    (run,) = read_runs([folder])
    assert not run.finished


def test_samples_at_a_time_are_read_off_the_learners(tmp_path):
    run = SyntheticRun()
    (read,) = read_runs([run.write(tmp_path / "a")])
    times = np.array([10.0, 20.0])
    assert read.samples_seen_at(times) == pytest.approx([run.samples_seen(10), run.samples_seen(20)], rel=0.01)
    assert np.isnan(Run("empty").samples_seen_at(times)).all()


def test_the_same_run_twice_is_one_run(tmp_path):
    folder = SyntheticRun().write(tmp_path / "a")
    assert len(read_runs([folder, tmp_path / "a" / ".." / "a"])) == 1


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    folders = [SyntheticRun().write(tmp_path / parent / "run") for parent in "ab"]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UsageError, match="nowhere' is not there; a report needs the folder of a run"):
        read_runs([tmp_path / "nowhere"])


def test_a_file_is_no_folder(tmp_path):
    folder = SyntheticRun().write(tmp_path / "a")
    with pytest.raises(UsageError, match=r"metrics.jsonl' is a file"):
        read_runs([folder / "metrics.jsonl"])


def test_a_folder_without_a_run_names_those_inside(tmp_path):
    with pytest.raises(UsageError, match=r"no run in .*`roundelay train --out` makes one"):
        read_runs([tmp_path])
    SyntheticRun().write(tmp_path / "inside")
    with pytest.raises(UsageError, match=r"did you mean .*inside"):
        read_runs([tmp_path])


def test_a_configuration_that_is_no_toml_is_named(tmp_path):
    folder = SyntheticRun().write(tmp_path / "a")
    (folder / "config.toml").write_text("= 3")
    with pytest.raises(ConfigError, match=r"config.toml' is no TOML"):
        read_runs([folder])


def test_metrics_that_are_no_text_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RoundelayError, match="cannot read the metrics in"):
        read_runs([tmp_path])
