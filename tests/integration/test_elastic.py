"""Real processes die, freeze, come back and join: training goes on, and every chunk is used."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roundelay.bench.chaos import Fault, run_once
from roundelay.training import run_directory
from roundelay.training.metrics import read_rows
from roundelay.training.recipes import resolve, table_of

PATIENCE_S = 150.0
PROGRAMS, TASK = str(Path(__file__).parent / "programs"), "paced_digits:PacedDigits"
pytestmark = pytest.mark.timeout(PATIENCE_S + 60)


@pytest.fixture(autouse=True)
def _paced(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(PROGRAMS)
    monkeypatch.setenv("PYTHONPATH", PROGRAMS, prepend=os.pathsep)
    monkeypatch.setenv("PACED_FOLDER", str(tmp_path))
    monkeypatch.setenv("PACED_STEP_S", "0.025")


def config_of(strategy="adpsgd", learners=4, epochs=30, **keys):
    """The digits, shared out so that no chunk of a lost learner is lost. Steps sleep, so that there is time for faults.

    With static shares, the default, chunks of a lost learner may stay unused; see test_elastic_defaults.py.
    """
    settings = {"strategy": strategy, "learners": learners, "budget.epochs": epochs} | keys
    settings["data.sharding"] = "dynamic"
    return resolve(table_of(TASK), [(key, str(value)) for key, value in settings.items()])


def faults(**kinds):
    return [Fault.parsed(kind, text) for kind, texts in kinds.items() for text in texts]


def events_of(outcome):
    """What happened to learners. Links that are cut while a learner is frozen are left out."""
    links = ("unreachable", "reachable")
    return [(event["event"], event["learner"]) for event in outcome["events"] if event["event"] not in links]


def assert_nothing_lost(outcome):
    assert outcome["exit_code"] == 0
    assert outcome["finished"]
    assert outcome["chunks"]["never"] == 0
    assert outcome["test"]["accuracy"] > 0.9


@pytest.mark.slow
def test_without_faults_every_chunk_is_used_once_and_the_sum_is_conserved(tmp_path):
    outcome = run_once(config_of(epochs=8), (), tmp_path / "run")
    assert_nothing_lost(outcome)
    assert outcome["events"] == []
    assert outcome["chunks"]["more_than_once"] == 0
    assert abs(outcome["conservation"]["relative"]) < 1e-5  # rounding of float32


@pytest.mark.parametrize(
    "strategy",
    ["dpsgd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("allreduce", "delay-by-one", "adpsgd"))],
)
def test_survivors_of_a_killed_learner_re_form_and_finish(tmp_path, strategy, capfd):
    outcome = run_once(config_of(strategy, epochs=18), faults(kill=["2@1"]), tmp_path / "run")
    assert_nothing_lost(outcome)
    assert events_of(outcome)[:2] == [("died", 2), ("recovered", None)]
    assert outcome["events"][1]["seconds"] < 5.0
    assert "learner 2 was lost on the way (killed by SIGKILL)" in capfd.readouterr().err


@pytest.mark.slow
def test_a_frozen_learner_is_dropped_and_comes_back_when_it_wakes(tmp_path):
    outcome = run_once(config_of(epochs=40), faults(freeze=["1@1:6.5"]), tmp_path / "run")
    assert_nothing_lost(outcome)
    assert events_of(outcome)[:4] == [("dropped", 1), ("recovered", None), ("joined", 1), ("recovered", None)]
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row.get("learner") == 1]
    back = next(event["elapsed_s"] for event in outcome["events"] if event["event"] == "joined")
    assert any(row["kind"] == "learner" and row["elapsed_s"] > back for row in rows)  # it trains again


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd"])
def test_a_learner_that_is_started_again_joins_with_its_old_id(tmp_path, strategy):
    outcome = run_once(config_of(strategy, epochs=150), faults(kill=["2@1"], join=["2@2"]), tmp_path / "run")
    assert_nothing_lost(outcome)
    assert [event for event in events_of(outcome) if event[0] != "recovered"] == [("died", 2), ("joined", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd"])
def test_a_super_learner_whose_member_dies_is_lost_as_a_whole_and_the_others_finish(tmp_path, strategy):
    outcome = run_once(config_of(strategy, learners=6, epochs=60, group_size=2), faults(kill=["3@1"]), tmp_path / "run")
    assert_nothing_lost(outcome)
    assert sorted(event for event in events_of(outcome) if event[0] == "died") == [("died", 2), ("died", 3)]


@pytest.mark.slow
def test_three_of_eight_learners_die(tmp_path):
    outcome = run_once(config_of(learners=8, epochs=60), faults(kill=["1@1", "4@2", "6@2"]), tmp_path / "run")
    assert_nothing_lost(outcome)
    assert sorted(event for event in events_of(outcome) if event[0] == "died") == [
        ("died", 1),
        ("died", 4),
        ("died", 6),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_whichever_faults_happen_a_run_ends_with_every_chunk_used(tmp_path, seed):
    draw = random.Random(seed)
    learners = draw.choice([3, 4, 5])
    happening = []
    for victim in draw.sample(range(learners), draw.randint(1, learners - 2)):
        at = draw.uniform(0.5, 4.0)
        if draw.random() < 0.5:
            happening.append(Fault(at, victim, "freeze", draw.uniform(1.0, 9.0)))
        else:
            happening.append(Fault(at, victim, "kill"))
            if draw.random() < 0.5:
                happening.append(Fault(at + 1.0, victim, "join"))
    strategy = draw.choice(["adpsgd", "adpsgd", "dpsgd"])
    outcome = run_once(config_of(strategy, learners, epochs=80), happening, tmp_path / "run")
    assert_nothing_lost(outcome)


@pytest.mark.slow
def test_with_too_few_learners_left_the_run_is_saved_and_the_printed_command_resumes_it(tmp_path, capfd):
    outcome = run_once(config_of(learners=3, epochs=12, min_learners=3), faults(kill=["0@1"]), tmp_path / "run")
    assert outcome["exit_code"] == 1
    assert not outcome["finished"]
    (stopping,) = [event for event in outcome["events"] if event["event"] == "stopping"]
    assert stopping["reason"] == "2 learners live, fewer than the 3 that the run needs"
    saved = max((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))
    assert {each["learner"] for each in json.loads(saved.read_text())["files"]} >= {1, 2}
    *_, printed = capfd.readouterr().err.splitlines()
    program, *words = shlex.split(printed)
    assert program == "roundelay"
    with Command(*words) as resumed:
        assert "finished in" in resumed.finished()


class Command:
    """`roundelay ...` in the background; it is ended when the block ends."""

    def __init__(self, *words, **variables):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "roundelay", *map(str, words)],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.stdout.close()
        self.process.wait()

    def wait_for(self, condition, what):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline, f"no {what} in time"
            time.sleep(0.1)

    def finished(self):
        said, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, said
        return said


def learners_of(folder):
    path = folder / "metrics.jsonl"
    return {row["learner"] for row in read_rows(path) if row["kind"] == "learner"} if path.exists() else set()


def logs_of(folder):
    return "".join(path.read_text() for path in (folder / "logs").glob("*.log"))


@pytest.mark.slow
def test_a_learner_joins_a_run_under_way_by_one_command(tmp_path):
    folder = tmp_path / "run"
    with Command("train", TASK, "--learners", 2, "--epochs", 50, "--out", folder) as training:
        training.wait_for(lambda: learners_of(folder) == {0, 1}, "training")
        with Command("train", "--join", folder) as joining:
            joining.wait_for(lambda: learners_of(folder) == {0, 1, 2}, "third learner")
            assert "learner 2 joined; 3 live" in training.finished()
            assert f"joining: {folder}" in joining.finished()
    assert json.loads((folder / "results.json").read_text())["test"]["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
def test_a_rendezvous_that_is_killed_and_started_again_rebuilds_its_state_from_the_learners(tmp_path, tls):
    folder, secret = tmp_path / "run", {"ROUNDELAY_SECRET": "5e" * 32}
    more = ["--tls", tmp_path / "certificate"] if tls else []
    with Command("rendezvous", "--port", 0, *more, **secret) as first:
        address = re.fullmatch(r"rendezvous: (.*)\n", first.process.stdout.readline())[1]
        port = address.rpartition(":")[2]
        options = ["--learners", 3, "--epochs", 80, "--out", folder, "--set", "data.sharding=dynamic"]
        with Command("train", TASK, *options, "--rendezvous", address, *more, **secret) as training:
            training.wait_for(lambda: learners_of(folder) == {0, 1, 2}, "training")
            first.process.kill()
            first.process.wait()
            steps = len((folder / "metrics.jsonl").read_text())
            time.sleep(3)
            assert len((folder / "metrics.jsonl").read_text()) > steps  # they go on without it
            with Command("rendezvous", "--port", port, *more, **secret):
                training.finished()
    assert logs_of(folder).count("has found the rendezvous again") == 3
    assert json.loads((folder / "results.json").read_text())["test"]["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd"])
def test_learners_of_several_machines_find_each_other_at_a_rendezvous(tmp_path, strategy):
    """Every machine is an address of its own on the loopback interface."""
    folder, secret = tmp_path / "run", tmp_path / "secret"
    secret.write_text("5e" * 32)
    common = ["--secret-file", secret, *(["--open-collectives"] if strategy == "dpsgd" else [])]
    with Command("rendezvous", "--host", "127.0.0.2", "--port", 0, *common) as rendezvous:
        address = re.fullmatch(r"rendezvous: (.*)\n", rendezvous.process.stdout.readline())[1]
        options = ["--learners", 3, "--strategy", strategy, "--rendezvous", address, "--out", folder, *common]
        with (
            Command("train", "tiny", *options, "--here", 2, "--host", "127.0.0.3") as one,
            Command("train", "tiny", *options, "--here", 1, "--host", "127.0.0.4") as other,
        ):
            one.finished()
            other.finished()
    assert json.loads((folder / "results.json").read_text())["learners"] == 3, logs_of(folder)


@pytest.mark.slow
def test_a_process_without_the_secret_cannot_join(tmp_path):
    folder = tmp_path / "run"
    with Command("train", TASK, "--learners", 2, "--epochs", 50, "--out", folder) as training:
        training.wait_for(lambda: learners_of(folder) == {0, 1}, "training")
        assert (folder / run_directory.TICKET).stat().st_mode & 0o077 == 0
        address = "{}:{}".format(*run_directory.ticket(folder).address)
        outsider = Command("train", "--join", address, ROUNDELAY_SECRET="00" * 32)
        with outsider:
            said, _ = outsider.process.communicate(timeout=PATIENCE_S)
        assert outsider.process.returncode == 2
        assert "does not know this run's secret" in said or "cannot join" in said
        training.finished()
    assert learners_of(folder) == {0, 1}
