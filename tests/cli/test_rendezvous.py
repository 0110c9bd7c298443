from __future__ import annotations

import pytest

from roundelay.cli import main


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
