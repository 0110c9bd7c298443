"""`roundelay simulate` on the command line."""

from __future__ import annotations

import argparse
import json

import pytest

from roundelay.cli import simulate
from roundelay.errors import UsageError


def call(*words: str) -> None:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    simulate.run(parser.parse_args(words))


def test_simulate_writes_a_run(capsys, tmp_path):
    call(
        "tiny",
        "--epochs",
        "1",
        "--learners",
        "8",
        "--network",
        "10Gb,50us",
        "--out",
        str(tmp_path / "run"),
        "--json",
    )
    results = json.loads(capsys.readouterr().out)
    assert results["learners"] == 8
    assert results["elapsed_s"] > 0
    assert (tmp_path / "run/config.toml").exists()
    assert (tmp_path / "run/machine.json").exists()


def test_simulate_plays_back_the_step_times_of_a_run(capsys, tmp_path):
    words = ("tiny", "--epochs", "1", "--strategy", "allreduce", "--learners", "2", "--json", "--network", "100Gb,0")
    call(*words, "--step-time", "7s", "--out", str(tmp_path / "first"))
    call(*words, "--times-of", str(tmp_path / "first"), "--out", str(tmp_path / "again"))
    first, again = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("first", "again"))
    assert again["elapsed_s"] == pytest.approx(first["elapsed_s"])
    assert again["elapsed_s"] > 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step-time", "0"], "--step-time must be more than 0, got 0; give a time such as 100ms"),
        (["--inside-bandwidth", "0B"], "--inside-bandwidth must be more than 0"),
        (["--times-of", "run", "--step-time", "1"], "leave --step-time and --step-spread out"),
        (["--times-of", "run", "--step-spread", "0.1"], "leave --step-time and --step-spread out"),
    ],
)
def test_simulate_refuses_a_cluster_that_cannot_be(tmp_path, words, message):
    with pytest.raises(UsageError, match=message):
        call("tiny", *words, "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["0Gb,5us", "100Gb", "100Gb,-1us"])
def test_simulate_refuses_a_network_that_cannot_be(capsys, value):
    with pytest.raises(SystemExit):
        call("tiny", "--network", value)
    assert "--network" in capsys.readouterr().err


def test_simulate_refuses_times_of_a_directory_without_a_run(tmp_path):
    with pytest.raises(UsageError, match="--times-of needs the directory of a run"):
        call("tiny", "--times-of", str(tmp_path), "--out", str(tmp_path / "run"))
