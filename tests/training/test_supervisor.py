from __future__ import annotations

import pytest

from roundelay.errors import ConfigError
from roundelay.training import run_directory
from roundelay.training.recipes import resolve, table_of
from roundelay.training.supervisor import Supervisor
from roundelay.training.verdict import sentence as sentence_of


def test_the_command_that_resumes_a_run_is_that_of_train(tmp_path):
    supervisor = Supervisor(resolve(table_of("tiny")), tmp_path / "my run")
    assert supervisor._resume_command == f"roundelay train --out '{tmp_path}/my run' --resume"


def test_a_run_that_ended_before_its_first_row_can_be_begun_again_and_a_run_that_trained_cannot(tmp_path):
    config = resolve(table_of("tiny"))
    run_directory.begin(tmp_path / "run", config, "first")
    metrics = tmp_path / "run" / run_directory.METRICS
    metrics.write_text('{"kind": "event", "event": "died"}\n')
    run_directory.begin(tmp_path / "run", config, "second")
    assert not metrics.exists()
    assert '"second"' in (tmp_path / "run" / run_directory.MACHINE).read_text()
    metrics.write_text('{"kind": "learner"}\n')
    with pytest.raises(ConfigError, match="holds a run already"):
        run_directory.begin(tmp_path / "run", config, "third")
    assert metrics.exists()


def test_files_of_a_folder_without_a_run_are_kept(tmp_path):
    (tmp_path / run_directory.METRICS).write_text("mine")
    run_directory.begin(tmp_path, resolve(table_of("tiny")), "first")
    assert (tmp_path / run_directory.METRICS).read_text() == "mine"


def test_a_finished_run_that_goes_on_keeps_its_results(tmp_path):
    (tmp_path / "results.json").write_text("{}")
    for _ in range(2):  # also if there are none
        run_directory.set_results_aside(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.previous.json"]


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ({"event": "died", "learner": 2, "reason": "killed"}, "learner 2 died (killed); 3 live"),
        ({"event": "joined", "learner": 4, "reason": ""}, "learner 4 joined; 3 live"),
        ({"event": "stopping", "learner": 2, "reason": "too few"}, "stopping: too few"),
        (
            {"event": "recovered", "learner": None, "reason": "x", "seconds": 0.26},
            "recovered after 0.3 s: 3 learners go on",
        ),
        (
            {"event": "recovered", "learner": None, "reason": "x", "seconds": 2.0, "living": 1},
            "recovered after 2.0 s: 1 learner goes on",
        ),
    ],
)
def test_events_are_shown_as_sentences(event, sentence):
    assert sentence_of({"living": 3} | event) == sentence
