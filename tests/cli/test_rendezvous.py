from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from roundelay.cli import main
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.training import checkpoint, run_directory
from roundelay.training.checkpoint import Checkpoint
from roundelay.training.recipes import as_table, resolve, table_of
from roundelay.training.resuming import Resume
from roundelay.training.supervisor import Supervisor
from roundelay.training.verdict import Ending
from roundelay.transport.security import Security

LEFT = Ending(Path("elsewhere"), "a command", signal=None, stop_reason="", failed={}, learners=1, joined=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rendezvous", "--host", "0.0.0.0"], "need the run's secret"),
        (["train", "tiny", "--host", "0.0.0.0"], "need the run's secret"),
        (["train", "tiny", "--rendezvous", "127.0.0.1:1"], "need the run's secret"),
        (["train", "tiny", "--rendezvous", "nowhere", "--secret-file", "SHORT"], "an address is HOST:PORT"),
        (["train", "tiny", "--rendezvous", "h:99999", "--secret-file", "SHORT"], "with a port of at most 65535"),
        (["rendezvous", "--port", "99999"], "needs a port from 0 to 65535, got '99999'"),
        (["rendezvous", "--port", "-1"], "needs a port from 0 to 65535"),
        (["train", "tiny", "--tls", "FILE"], "cannot make the folder 'FILE' for a certificate: File exists"),
        (["train", "tiny", "--secret-file", "SHORT"], "the secret in 'SHORT' must be at least 32 hexadecimal digits"),
        (["train", "tiny", "--secret-file", "ABSENT"], "cannot read --secret-file"),
        (["train", "tiny", "--here", "2"], "--here goes with --rendezvous"),
        (["train"], "train needs a RECIPE"),
        (["train", "--join", "EMPTY"], "no run under way that can be joined"),
        (["chaos", "tiny", "--kill", "9@1s"], "the living learners are 0, 1, 2, 3"),
        (["chaos", "tiny", "--freeze", "1@1s"], "--freeze needs LEARNER@TIME:DURATION"),
        (["chaos", "tiny", "--set", "x"], "--set needs KEY=VALUE"),
    ],
)
def test_wrong_input_is_one_line_and_starts_nothing(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.delenv("ROUNDELAY_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SHORT").write_text("a" * 40 if "--rendezvous" in words else "abc")
    (tmp_path / "FILE").write_text("no folder")
    (tmp_path / "EMPTY").mkdir()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


PREPARED = {"PYTHONPATH": "/elsewhere", "LD_PRELOAD": "/elsewhere/x.so", "HOME": "/elsewhere"}


TICKET = {
    "address": ["127.0.0.1", 29400],
    "learners": 4,
    "min_learners": 1,
    "run": "",
    "security": {"ROUNDELAY_SECRET": "5e" * 32},
}


def test_a_prepared_ticket_changes_nothing_in_the_environment(tmp_path, monkeypatch):
    """Only the keys of a secret are read, and no key reaches the environment, which workers inherit."""
    monkeypatch.delenv("ROUNDELAY_SECRET", raising=False)
    config = resolve(table_of("tiny"))
    run_directory.begin(tmp_path, config, "a test")
    document = TICKET | PREPARED | {"security": TICKET["security"] | PREPARED}
    (tmp_path / run_directory.TICKET).write_text(json.dumps(document))
    before, started = dict(os.environ), []
    monkeypatch.setattr(Supervisor, "run", lambda supervisor: started.append(supervisor) or LEFT)
    monkeypatch.setattr(RendezvousClient, "__init__", lambda *_, **__: None)
    info = {"folder": str(tmp_path), "run": "this one", "config": as_table(config)}
    monkeypatch.setattr(RendezvousClient, "ask_for_info", lambda _: info)
    monkeypatch.setattr(RendezvousClient, "close", lambda *_: None)
    assert main(["train", "--join", str(tmp_path)]) == 0
    assert dict(os.environ) == before
    assert started[0]._settings.security == Security(bytes.fromhex("5e" * 32))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (TICKET | {"security": {}}, "has no secret"),
        (TICKET | {"security": {"ROUNDELAY_SECRET": "5e"}}, "must be at least 32 hexadecimal digits"),
        ({"learners": 4}, "this is no ticket of a run ('address')"),
        (["address"], "this is no ticket of a run"),
        (TICKET | {"address": ["127.0.0.1", "x"]}, "this is no ticket of a run"),
        (TICKET | {"security": TICKET["security"] | {"ROUNDELAY_TLS": "/absent"}}, "must have cert.pem"),
    ],
)
def test_a_damaged_ticket_is_refused_in_one_line(tmp_path, mistake, document, message):
    (tmp_path / run_directory.TICKET).write_text(json.dumps(document))
    assert message in mistake("train", "--join", str(tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        ["train", "tiny", "--out", "runs/my run"],
        ["train", "tiny", "--tls", "certificate"],
        ["train", "tiny", "--out", "a", "--rendezvous", "10.0.0.1:29400", "--here", "2", "--secret-file", "secret"],
        ["train", "--join", "10.0.0.1:29400", "--out", "begun", "--secret-file", "secret", "--host", "10.0.0.2"],
    ],
)
def test_the_command_that_continues_a_run_is_accepted_as_printed(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROUNDELAY_SECRET", raising=False)
    (tmp_path / "secret").write_text("5e" * 32)
    config = resolve(table_of("tiny"))
    run_directory.begin(tmp_path / "begun", config, "a test")
    started = []
    monkeypatch.setattr(Supervisor, "run", lambda supervisor: started.append(supervisor) or LEFT)
    monkeypatch.setattr(RendezvousClient, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(RendezvousClient, "ask_for_info", lambda _: {"run": "this one", "config": as_table(config)})
    monkeypatch.setattr(RendezvousClient, "close", lambda *_: None)
    chosen = Checkpoint(tmp_path, 2600, dict.fromkeys(range(4), ("", "")))
    monkeypatch.setattr(checkpoint, "choose", lambda *_: chosen)
    assert main(words) == 0
    printed = started[0]._resume_command
    program, *again = shlex.split(printed)
    assert program == "roundelay"
    assert main(again) == 0
    assert started[1].folder == started[0].folder
    assert started[1]._resume_command == printed
    if "--rendezvous" in words:  # the machines agree on the newest checkpoint when they have met
        assert started[1]._resume == Resume(together=True)
    elif "--join" not in words:
        assert started[1]._resume == Resume(2600)


def test_only_a_run_of_train_can_be_joined_by_train(tmp_path, monkeypatch, mistake):
    """A rendezvous of `roundelay launch` knows no configuration."""
    (tmp_path / run_directory.TICKET).write_text(json.dumps(TICKET))
    monkeypatch.setattr(RendezvousClient, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(RendezvousClient, "ask_for_info", lambda _: {"run": "a script"})
    monkeypatch.setattr(RendezvousClient, "close", lambda *_: None)
    assert "was not started by `roundelay train`" in mistake("train", "--join", str(tmp_path))
