"""`roundelay simulate`, `scaling` and `reproduce`."""

from __future__ import annotations

import argparse
import json

import pytest

from roundelay import papers as claims
from roundelay.cli import reproduce, scaling, simulate
from roundelay.errors import UsageError
from roundelay.papers import Claim, Finding, Line, Panel


def call(command, *words: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args(words))


@pytest.fixture
def small_claims(monkeypatch):
    """Two claims that take no time; the second is interrupted."""

    def quick(seeds, progress):
        progress(1.0)
        lines = [Line("a", [1, 2], [[1.0, 2.0] for _ in seeds])]
        return Finding("reproduced", "it holds", {"figure": 1.0}, [Panel("t", "x", "y", lines)])

    def interrupted(seeds, progress):
        raise KeyboardInterrupt

    monkeypatch.setitem(claims.CLAIMS, "mixing", Claim("mixing", "s", "setting", "differs", quick))
    monkeypatch.setitem(claims.CLAIMS, "rate", Claim("rate", "s", "setting", "differs", interrupted))


def test_reproduce_prints_claims_with_name_verdict_and_figures(small_claims, capsys, tmp_path):
    call(reproduce, "mixing", "--json", "--out", str(tmp_path))
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert (claim["name"], claim["verdict"], claim["figures"]) == ("mixing", "reproduced", {"figure": 1.0})
    assert {path.name for path in tmp_path.iterdir()} == {"mixing.json", "mixing.svg"}


def test_ctrl_c_keeps_the_finished_claims(small_claims, capsys, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        call(reproduce, "mixing", "rate", "--json", "--out", str(tmp_path))
    document = json.loads(capsys.readouterr().out)
    assert document["interrupted"]
    assert [claim["name"] for claim in document["claims"]] == ["mixing"]
    assert (tmp_path / "mixing.json").exists()


def test_an_unknown_claim_is_a_mistake_that_names_the_nearest(capsys):
    with pytest.raises(UsageError, match="did you mean 'mixing'"):
        call(reproduce, "mixng")


def test_two_seeds_are_too_few():
    with pytest.raises(UsageError, match="at least 3"):
        call(reproduce, "rate", "--seeds", "2")


def test_names_on_the_command_line_are_the_claims_that_exist():
    assert set(reproduce.CLAIM_NAMES) == set(claims.CLAIMS)


def test_scaling_predicts_every_strategy_from_1_to_1024_learners(capsys):
    call(scaling, "--json", "--step-time", "300ms", "--model-bytes", "165MB")
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert {row["learners"] for row in rows} == {2**k for k in range(11)}
    assert all(0 < row["efficiency"] <= 1 + 1e-9 for row in rows)


def test_scaling_says_what_was_fitted_to_the_papers_hours(capsys):
    call(scaling, "--papers")
    printed = capsys.readouterr().out
    assert "Fitted:" in printed
    assert "1.98" in printed


def test_scaling_refuses_a_step_that_takes_no_time():
    with pytest.raises(UsageError, match="--step-time must be more than 0"):
        call(scaling, "--step-time", "0")


def test_simulate_writes_a_run(capsys, tmp_path):
    call(
        simulate,
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
    call(simulate, *words, "--step-time", "7s", "--out", str(tmp_path / "first"))
    call(simulate, *words, "--times-of", str(tmp_path / "first"), "--out", str(tmp_path / "again"))
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
        call(simulate, "tiny", *words, "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["0Gb,5us", "100Gb", "100Gb,-1us"])
def test_simulate_refuses_a_network_that_cannot_be(capsys, value):
    with pytest.raises(SystemExit):
        call(simulate, "tiny", "--network", value)
    assert "--network" in capsys.readouterr().err


def test_simulate_refuses_times_of_a_directory_without_a_run(tmp_path):
    with pytest.raises(UsageError, match="--times-of needs the directory of a run"):
        call(simulate, "tiny", "--times-of", str(tmp_path), "--out", str(tmp_path / "run"))
