from __future__ import annotations

import shlex

import pytest

from roundelay.cli import main
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.training import checkpoint, run_directory
from roundelay.training.checkpoint import Checkpoint
from roundelay.training.recipes import resolve, table_of
from roundelay.training.supervisor import Supervisor


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rendezvous", "--host", "0.0.0.0"], "need the run's secret"),
        (["train", "tiny", "--host", "0.0.0.0"], "need the run's secret"),
        (["train", "tiny", "--rendezvous", "127.0.0.1:1"], "need the run's secret"),
        (["train", "tiny", "--rendezvous", "nowhere", "--secret-file", "SHORT"], "an address is HOST:PORT"),
        (["train", "tiny", "--secret-file", "SHORT"], "must be at least 32 hexadecimal digits"),
        (["train", "tiny", "--secret-file", "ABSENT"], "cannot read --secret-file"),
        (["train", "tiny", "--here", "2"], "--here goes with --rendezvous"),
        (["train"], "train needs a RECIPE"),
        (["train", "--join", "EMPTY"], "no run under way that can be joined"),
        (["chaos", "tiny", "--kill", "9@1s"], "the learners are 0 to 3"),
        (["chaos", "tiny", "--freeze", "1@1s"], "--freeze needs LEARNER@TIME:DURATION"),
        (["chaos", "tiny", "--set", "x"], "--set needs KEY=VALUE"),
    ],
)
def test_wrong_input_is_one_line_and_starts_nothing(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.delenv("ROUNDELAY_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SHORT").write_text("abc" if "nowhere" not in words else "a" * 40)
    (tmp_path / "EMPTY").mkdir()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


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
    run_directory.begin(tmp_path / "begun", resolve(table_of("tiny")), "a test")
    started = []
    monkeypatch.setattr(Supervisor, "run", lambda supervisor: started.append(supervisor) or 0)
    monkeypatch.setattr(RendezvousClient, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(RendezvousClient, "ask_for_info", lambda _: {})
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
    if "--join" not in words:
        assert started[1]._resume_at == 2600
