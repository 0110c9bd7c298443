from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from roundelay.training import recipes
from roundelay.training.recipes import resolve, table_of
from roundelay.training.supervisor import ConnectionSettings, Supervisor
from roundelay.training.verdict import sentence as sentence_of
from roundelay.training.worker import WorkerSpec
from roundelay.training.worker_process import Worker
from roundelay.transport.security import Security

SECRET = "5e" * 32


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_SECRET", SECRET)
    spec = WorkerSpec(
        config=recipes.as_table(resolve(table_of("tiny"))),
        folder=str(tmp_path),
        resume_at=None,
        rendezvous=("127.0.0.1", 9),  # where nothing listens
        security=Security(bytes.fromhex(SECRET)).environment(),
        host="127.0.0.1",
        learner=0,
        local_rank=0,
        local_size=1,
    )
    worker = Worker(spec, tmp_path / "log", threads=1)
    yield worker
    worker.end()


def test_the_secret_is_neither_in_the_environment_nor_in_the_command_of_a_worker(worker):
    process = Path("/proc") / str(worker._process.pid)
    assert SECRET not in (process / "environ").read_text()
    assert SECRET not in (process / "cmdline").read_text()


def test_a_worker_that_fails_leaves_its_reason_as_the_last_line_of_its_log(worker):
    deadline = time.monotonic() + 60
    while worker.exit_code is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert worker.exit_code == 2
    assert worker.last_line().startswith("roundelay: error: cannot reach the rendezvous at 127.0.0.1:9")


def test_a_signal_to_a_worker_that_has_ended_has_no_effect(worker):
    worker.send(signal.SIGKILL)
    worker._process.wait()
    worker.send(signal.SIGTERM)
    assert worker.exit_code == -signal.SIGKILL


def test_collectives_need_the_loopback_or_a_permission():
    here = ConnectionSettings.on_this_machine()
    assert here.collectives_allowed
    assert not ConnectionSettings(here.security, host="10.0.0.1").collectives_allowed
    assert ConnectionSettings(here.security, host="10.0.0.1", open_collectives=True).collectives_allowed


def test_the_command_that_resumes_a_run_is_that_of_train(tmp_path):
    supervisor = Supervisor(resolve(table_of("tiny")), tmp_path / "my run")
    assert supervisor._resume_command == f"roundelay train --out '{tmp_path}/my run' --resume"


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
