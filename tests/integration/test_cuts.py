"""A link between two machines is cut while both still reach the rendezvous, and heals. Four learners, real processes."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time

import pytest
from commands import Command, logs_of, rows_of
from machines import cut, inside, machines

from roundelay.transport.heartbeats import LOST_AFTER_S

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
EPOCHS = 200


@contextlib.contextmanager
def run_on_two_machines(strategy, folder):
    """Two learners each on two machines, which the test may cut; the rendezvous is on a third one."""
    secret = folder.parent / "secret"
    secret.write_text("5e" * 32)
    common = ["--secret-file", secret, "--open-collectives"]
    with machines(3) as (center, left, right), contextlib.ExitStack() as running:

        def start(machine, *words):
            words = [*words, "--host", machine.address, *common]
            command = Command(*words, inside=inside(machine), PACED_FOLDER=str(folder.parent))
            return running.enter_context(command)

        rendezvous = start(center, "rendezvous", "--port", 0)
        rendezvous.wait_for(lambda: "rendezvous: " in rendezvous.said(), "address")
        at = re.search(r"rendezvous: (.*)\n", rendezvous.said())[1]
        options = ["--learners", 4, "--strategy", strategy, "--epochs", EPOCHS, "--rendezvous", at, "--here", 2]
        words = ["train", "paced_digits:PacedDigits", *options, "--out", folder]
        one = start(left, *words)
        one.wait_for((folder / "config.toml").exists, "directory")
        yield functools.partial(cut, left, right), one, start(right, *words)


def metrics_of(folder, kind):
    """Rows of the metrics of both machines."""
    return [row for path in folder.glob("metrics*.jsonl") for row in rows_of(folder, kind, path.name)]


def all_train(folder):
    return {row["learner"] for row in metrics_of(folder, "learner")} == {0, 1, 2, 3}


def steps_of(folder):
    return {row["learner"]: row["steps"] for row in metrics_of(folder, "learner")}


def test_asynchronous_exchanges_across_a_cut_resume_when_it_heals(tmp_path):
    folder = tmp_path / "run"
    with run_on_two_machines("adpsgd", folder) as (cut_link, one, other):
        one.wait_for(lambda: all_train(folder), "training")
        with cut_link():
            one.wait_for(lambda: "unreachable" in dict(all_events(folder)), "unreachable learner", 60)
            before = steps_of(folder)
            time.sleep(3)
            assert all(steps > before[learner] for learner, steps in steps_of(folder).items())  # all go on meanwhile
            during = exchanges(folder)
        one.wait_for(lambda: "reachable" in dict(all_events(folder)), "reachable learner", 60)
        one.wait_for(lambda: len(grown(during, exchanges(folder))) == 12, "exchanges of all pairs", 60)
        (tmp_path / "hurry").touch()
        one.finished()
        other.finished()
    results = json.loads((folder / "results.json").read_text())
    assert (results["samples"], results["learners"]) == (EPOCHS * 1300, 4)
    assert "Traceback" not in logs_of(folder)


def all_events(folder):
    return [(row["event"], row["learner"]) for row in metrics_of(folder, "event")]


def exchanges(folder):
    """By (learner, peer): exchanges so far."""
    newest = {row["learner"]: row for row in metrics_of(folder, "learner")}
    return {
        (learner, int(name.rpartition("_")[2])): count
        for learner, row in newest.items()
        for name, count in row.items()
        if name.startswith("exchanges_with_")
    }


def grown(before, after):
    return [pair for pair, count in after.items() if count > before.get(pair, 0)]


@pytest.mark.parametrize("strategy", ["dpsgd", "allreduce"])
def test_synchronous_learners_go_on_in_one_part_and_come_together_when_the_cut_heals(tmp_path, strategy):
    folder = tmp_path / "run"
    with run_on_two_machines(strategy, folder) as (cut_link, one, other):
        one.wait_for(lambda: all_train(folder), "training")
        with cut_link():
            time.sleep(LOST_AFTER_S + 10)
            before = steps_of(folder)
            one.wait_for(lambda: len(grown(before, steps_of(folder))) == 2, "steps of one part", 60)
        since = steps_of(folder)
        one.wait_for(lambda: len(grown(since, steps_of(folder))) == 4, "steps of all four", 90)
        (tmp_path / "hurry").touch()
        one.finished()
        other.finished()
    results = json.loads((folder / "results.json").read_text())
    assert (results["samples"], results["learners"]) == (EPOCHS * 1300, 4)
    assert "Traceback" not in logs_of(folder)
