from __future__ import annotations

import subprocess
import sys

import pytest

from roundelay.cluster.rendezvous.members import RunSpec
from roundelay.cluster.ticket import Ticket
from roundelay.training import run_directory
from roundelay.training.recipes import resolve, table_of
from roundelay.training.worker import run_spec


def test_a_worker_that_fails_says_why_in_its_last_line(tmp_path, monkeypatch):
    nowhere = Ticket(("127.0.0.1", 9), {"ROUNDELAY_SECRET": "5e" * 32}, learners=4)  # nothing listens there
    monkeypatch.setenv("ROUNDELAY_TICKET", str(nowhere))
    run_directory.begin(tmp_path / "run", resolve(table_of("tiny")), "a test")
    command = [sys.executable, "-m", "roundelay.training.worker", str(tmp_path / "run"), "metrics.jsonl"]
    command += ["--files", "127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("roundelay: error: cannot reach the rendezvous at 127.0.0.1:9")


@pytest.mark.parametrize(
    ("settings", "stop_groups"),
    [
        ({"strategy": "dpsgd"}, (0, 0, 0, 0)),
        ({"strategy": "adpsgd"}, (0, 1, 2, 3)),
        ({"strategy": "adpsgd", "group_size": "2"}, (0, 0, 1, 1)),
    ],
)
def test_learners_that_step_together_are_one_stop_group(settings, stop_groups):
    config = resolve(table_of("tiny"), [("learners", "4"), ("min_learners", "2"), *settings.items()])
    assert run_spec(config) == RunSpec(expected=4, stop_groups=stop_groups, min_learners=2)
