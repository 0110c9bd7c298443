"""Faults in runs with default settings: static shares, no audit, every strategy. Real processes.

The other tests of faults set `data.sharding=dynamic`. Users do not, and that hid hangs and crashes.
"""

from __future__ import annotations

import json
import time

import pytest
from commands import Command, events_of, logs_of, trains

from roundelay.transport.heartbeats import LOST_AFTER_S

STRATEGIES = ["dpsgd", "allreduce", "delay-by-one", "delay-by-one-gradients", "adpsgd"]
SAMPLES = 1300
pytestmark = pytest.mark.timeout(200)


def slow_but(quick):
    """All strategies; all but `quick` run in `make test-all`."""
    return pytest.mark.parametrize(
        "strategy", [name if name == quick else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
    )


def train(folder, strategy, *words, epochs=40, **variables):
    """A run with default settings. Its steps are slow until the test calls `hurry`."""
    options = ["--strategy", strategy, "--epochs", epochs, "--out", folder]
    paced = {"PACED_FOLDER": str(folder.parent)} | variables
    return Command("train", "paced_digits:PacedDigits", *options, *words, **paced)


def hurry(folder):
    (folder.parent / "hurry").touch()


def assert_trained(folder, learners, epochs):
    """The run used its whole budget, ended with so many learners, and no learner crashed."""
    results = json.loads((folder / "results.json").read_text())
    assert (results["samples"], results["learners"]) == (epochs * SAMPLES, learners)
    assert results["test"]["accuracy"] > 0.9
    assert "SIGABRT" not in logs_of(folder)
    assert "Traceback" not in logs_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("frozen", [(1,), (0, 2)])
def test_learners_that_wake_up_train_on_with_the_others(tmp_path, strategy, frozen):
    folder, epochs = tmp_path / "run", 90
    with train(folder, strategy, epochs=epochs) as run:
        run.wait_for(lambda: trains(folder, 0, 1, 2, 3), "training")
        with run.frozen(*frozen):
            time.sleep(LOST_AFTER_S + 2.5)
        run.wait_for(lambda: {("joined", learner) for learner in frozen} <= set(events_of(folder)), "return")
        hurry(folder)
        said = run.finished()
    events = events_of(folder)
    for learner in frozen:
        assert events.index(("dropped", learner)) < events.index(("joined", learner)), said
    assert "died" not in dict(events), said
    assert_trained(folder, 4, epochs)


@slow_but("dpsgd")
def test_a_learner_joins_by_one_command(tmp_path, strategy):
    folder, epochs = tmp_path / "run", 60
    with train(folder, strategy, "--learners", 2, epochs=epochs) as run:
        run.wait_for(lambda: trains(folder, 0, 1), "training")
        with Command("train", "--join", folder, PACED_FOLDER=str(tmp_path)) as joining:
            joining.wait_for(lambda: trains(folder, 2), "third learner")
            hurry(folder)
            said = run.finished()
            joining.finished()
    assert "learner 2 joined; 3 live" in said
    assert_trained(folder, 3, epochs)


@slow_but("adpsgd")
def test_a_learner_that_dies_before_its_first_step_is_left_out(tmp_path, strategy):
    """It has registered, so the others already know it as a member."""
    folder, epochs = tmp_path / "run", 8
    hurry(folder)
    with train(folder, strategy, epochs=epochs, PACED_FAULT="module:2") as run:
        said = run.finished()
    assert "learner 2 died (killed by SIGKILL); 3 live" in said
    assert_trained(folder, 3, epochs)
