"""Faults in runs with default settings: static shares, no audit, every strategy. Real processes.

The other tests of faults set `data.sharding=dynamic`. Users do not, and that hid hangs and crashes.
"""

from __future__ import annotations

import json
import signal
import time

import pytest
from commands import Command, events_of, logs_of, trains

from roundelay.training import checkpoint
from roundelay.transport.heartbeats import LOST_AFTER_S

STRATEGIES = ["dpsgd", "allreduce", "delay-by-one", "delay-by-one-gradients", "adpsgd", "local-sgd"]
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


def assert_trained(folder, learners, epochs, crashes=0):
    """The run used its whole budget, ended with so many learners, and no other learner crashed."""
    results = json.loads((folder / "results.json").read_text())
    assert (results["samples"], results["learners"]) == (epochs * SAMPLES, learners)
    assert results["test"]["accuracy"] > 0.9
    assert "SIGABRT" not in logs_of(folder)
    assert logs_of(folder).count("Traceback") == crashes


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


@pytest.mark.parametrize("with_launcher", [False, pytest.param(True, marks=pytest.mark.slow)])
@slow_but("adpsgd")
def test_a_run_goes_on_after_all_learners_have_stood_still_at_once(tmp_path, strategy, with_launcher):
    folder, epochs = tmp_path / "run", 40
    with train(folder, strategy, epochs=epochs) as run:
        run.wait_for(lambda: trains(folder, 0, 1, 2, 3), "training")
        with run.frozen(0, 1, 2, 3, launcher=with_launcher):
            time.sleep(LOST_AFTER_S + 3)
        hurry(folder)
        said = run.finished()
    assert events_of(folder) == [], said
    assert_trained(folder, 4, epochs)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_ends_well_if_all_learners_stand_still_while_the_result_is_made(tmp_path, strategy):
    folder, epochs = tmp_path / "run", 20
    hurry(folder)
    with train(folder, strategy, epochs=epochs, PACED_EVALUATION_S="3") as run:
        run.wait_for((tmp_path / "evaluating").exists, "evaluation")
        with run.frozen(0, 1, 2, 3):
            time.sleep(LOST_AFTER_S + 3)
        run.finished()
    assert_trained(folder, 4, epochs)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_learner_that_stands_still_until_the_run_has_ended_does_not_hold_it_up(tmp_path, strategy):
    folder, epochs = tmp_path / "run", 40
    with train(folder, strategy, epochs=epochs) as run:
        run.wait_for(lambda: trains(folder, 0, 1, 2, 3), "training")
        with run.frozen(1):
            run.wait_for(lambda: ("dropped", 1) in events_of(folder), "loss of the frozen one")
            hurry(folder)
            run.wait_for((folder / "results.json").exists, "result")
        run.finished()
    assert_trained(folder, 3, epochs)


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


@pytest.mark.slow
@slow_but("adpsgd")
def test_a_learner_that_dies_before_its_first_step_is_left_out(tmp_path, strategy):
    """It has registered, so the others already know it as a member."""
    folder, epochs = tmp_path / "run", 20
    hurry(folder)
    with train(folder, strategy, epochs=epochs, PACED_FAULT="module:2") as run:
        said = run.finished()
    assert "learner 2 died (killed by SIGKILL); 3 live" in said
    assert_trained(folder, 3, epochs)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise:1", pytest.param("task:1", marks=pytest.mark.slow)])
@slow_but("adpsgd")
def test_a_learner_that_dies_before_it_registers_is_left_out(tmp_path, strategy, fault):
    folder, epochs = tmp_path / "run", 20
    hurry(folder)
    with train(folder, strategy, epochs=epochs, PACED_FAULT=fault) as run:
        said = run.finished()
    reason = "killed by SIGKILL" if fault == "task:1" else "exit code 1: ZeroDivisionError: this task cannot be built"
    assert f"died ({reason}); " in said
    assert_trained(folder, 3, epochs, crashes=int(fault == "raise:1"))


def test_too_many_learners_that_die_before_they_register_end_the_run_in_one_line(tmp_path):
    folder = tmp_path / "run"
    with train(folder, "adpsgd", "--set", "min_learners=4", PACED_FAULT="raise:1") as run:
        assert run.ended() == 1
        *_, last = run.said().splitlines()
    assert (
        "only 3 of 4 learners can come, fewer than the 4 that the run needs; the first that ended: exit code 1" in last
    )
    assert "nothing was saved" in last
    assert list((folder / "checkpoints").iterdir()) == []


@pytest.mark.slow
@slow_but("adpsgd")
def test_ctrl_c_stops_a_learner_that_has_joined_and_saves_what_all_have(tmp_path, strategy):
    folder = tmp_path / "run"
    with train(folder, strategy, "--learners", 2, epochs=400) as run:
        run.wait_for(lambda: trains(folder, 0, 1), "training")
        with Command("train", "--join", folder, PACED_FOLDER=str(tmp_path)) as joining:
            joining.wait_for(lambda: trains(folder, 2), "third learner")
            run.process.send_signal(signal.SIGINT)
            assert run.ended() == 128 + signal.SIGINT, run.said()
            assert "stopped and saved; go on with:" in run.said()
            assert joining.ended() == 0, joining.said()
            assert "left the run" in joining.said()
    newest = checkpoint.choose(folder / "checkpoints")
    assert sorted(newest.files) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_in_the_terminal_of_a_learner_that_has_joined_takes_only_that_one_out(tmp_path, strategy):
    folder, epochs = tmp_path / "run", 60
    with train(folder, strategy, "--learners", 2, epochs=epochs) as run:
        run.wait_for(lambda: trains(folder, 0, 1), "training")
        with Command("train", "--join", folder, PACED_FOLDER=str(tmp_path)) as joining:
            joining.wait_for(lambda: trains(folder, 2), "third learner")
            joining.process.send_signal(signal.SIGINT)
            assert joining.ended() == 128 + signal.SIGINT
            assert "left the run" in joining.said()
        hurry(folder)
        run.finished()
    assert_trained(folder, 2, epochs)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd"])
def test_a_rendezvous_refuses_a_second_run_and_serves_it_once_the_first_has_ended(tmp_path, strategy):
    secret = {"ROUNDELAY_SECRET": "5e" * 32}
    with Command("rendezvous", "--port", 0, **secret) as rendezvous:
        rendezvous.wait_for(lambda: "rendezvous: " in rendezvous.said(), "address")
        at = ["--rendezvous", rendezvous.said().split("rendezvous: ")[1].split("\n")[0], "--learners", 2]
        first, second = tmp_path / "first", tmp_path / "second"
        with train(first, strategy, *at, epochs=60, **secret) as run:
            run.wait_for(lambda: trains(first, 0, 1), "training")
            with train(second, strategy, *at, "--seed", 1, **secret) as stranger:
                assert stranger.ended() == 1
                assert f"this rendezvous serves the run '{first.name} " in stranger.said()
            hurry(first)
            run.finished()
        assert_trained(first, 2, 60)
        with train(second, strategy, *at, "--seed", 1, "--out", tmp_path / "third", **secret) as run:
            run.finished()
    assert_trained(tmp_path / "third", 2, 40)


def test_while_learners_are_missing_the_supervisor_says_which_and_where_they_should_connect(tmp_path):
    secret = {"ROUNDELAY_SECRET": "5e" * 32}
    with Command("rendezvous", "--port", 0, **secret) as rendezvous:
        rendezvous.wait_for(lambda: "rendezvous: " in rendezvous.said(), "address")
        address = rendezvous.said().split("rendezvous: ")[1].split("\n")[0]
        options = ["--rendezvous", address, "--learners", 3, "--here", 1]
        with train(tmp_path / "run", "adpsgd", *options, **secret) as run:
            sentence = "1 of 3 learners have come (0); missing: 1, 2"
            run.wait_for(lambda: f"waiting at {address}: {sentence}" in run.said(), "sentence", 60)
            assert f"waiting ({sentence})" in rendezvous.said()
