from __future__ import annotations

import pytest

from roundelay.training import run_directory
from roundelay.training.recipes import resolve, table_of
from roundelay.training.supervisor import Supervisor
from roundelay.training.verdict import sentence as sentence_of


def test_the_command_that_resumes_a_run_is_that_of_train(tmp_path):
    supervisor = Supervisor(resolve(table_of("tiny")), tmp_path / "my run")
    assert supervisor._resume_command == f"roundelay train --out '{tmp_path}/my run' --resume"


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
    ],
)
def test_events_are_shown_as_sentences(event, sentence):
    assert sentence_of(event | {"living": 3}) == sentence
