"""A run on several machines without a shared file system: every machine has a directory of its own. Real processes.

The machines are directories, and supervisors, of one host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest
from commands import Command, logs_of, rows_of, trains

from roundelay.training import checkpoint
from roundelay.training.directory_server import machine_name

pytestmark = pytest.mark.timeout(240)
SAMPLES = 1300
SECRET = {"ROUNDELAY_SECRET": "5e" * 32}


class Machines:
    """Several machines of one run. Steps are slow until `hurry`."""

    def __init__(self, folder, *names):
        self.folder = folder
        self.directories = [folder / name / "run" for name in names]
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        self.rendezvous = self._stack.enter_context(Command("rendezvous", "--port", 0, **SECRET))
        self.rendezvous.wait_for(lambda: "rendezvous: " in self.rendezvous.said(), "address")
        self.address = self.rendezvous.said().split("rendezvous: ")[1].split("\n")[0]
        return self

    def __exit__(self, *error):
        self._stack.__exit__(*error)

    def command(self, *words):
        return self._stack.enter_context(Command("train", *words, PACED_FOLDER=str(self.folder), **SECRET))

    def train(self, *options, here=2):
        """One command on every machine."""
        more = ["--learners", here * len(self.directories), "--here", here, "--rendezvous", self.address, *options]
        task = [] if "--resume" in options else ["paced_digits:PacedDigits"]
        return [self.command(*task, *more, "--out", directory) for directory in self.directories]

    def hurry(self):
        (self.folder / "hurry").touch()

    def slow_down(self):
        (self.folder / "hurry").unlink(missing_ok=True)

    def all_train(self, learners):
        found = {row["learner"] for directory in self.directories for row in rows_of(directory, "learner")}
        return found >= set(range(learners))


def results_of(directory):
    return json.loads((directory / "results.json").read_text())


def with_model(directories):
    (found,) = [directory for directory in directories if (directory / "model.safetensors").exists()]
    return found


def assert_gathered(directories, learners, epochs):
    """One machine has the model, a whole last checkpoint and all metrics; all machines have the results."""
    first = with_model(directories)
    logs = "".join(map(logs_of, directories))
    assert "Traceback" not in logs
    results = results_of(first)
    assert (results["samples"], results["learners"]) == (epochs * SAMPLES, learners), logs
    assert results["test"]["accuracy"] > 0.9
    for other in set(directories) - {first}:
        assert results_of(other) == results | {"model": f"{os.uname().nodename}:{first}"}
    last = checkpoint.complete(first / "checkpoints")[-1]
    last.verify()
    assert (last.samples_seen, len(last.files)) == (epochs * SAMPLES, learners)
    return first


@pytest.mark.parametrize("strategy", ["adpsgd", pytest.param("dpsgd", marks=pytest.mark.slow)])
def test_each_machine_keeps_its_files_and_the_first_gathers_the_model(tmp_path, strategy):
    with Machines(tmp_path, "one", "other") as machines:
        machines.hurry()
        runs = machines.train("--strategy", strategy, "--epochs", 20, "--set", "checkpoint.every_epochs=4")
        said = [run.finished() for run in runs]
    first = assert_gathered(machines.directories, 4, 20)
    (other,) = set(machines.directories) - {first}
    assert str(first / "model.safetensors") in said[machines.directories.index(first)]
    assert f"the model is on {os.uname().nodename}:{first}" in said[machines.directories.index(other)]
    own = {piece for found in checkpoint.pieces(other / "checkpoints").values() for piece in found}
    assert len(own) == 2  # only those of its own learners
    copied = first / f"metrics-from-{machine_name(other)}.jsonl"
    assert copied.read_bytes() == (other / "metrics.jsonl").read_bytes()
    with Command("report", first, "--out", tmp_path / "report.html") as report:
        report.finished()
    with Command("evaluate", other) as refused:
        assert refused.ended() == 2
        assert f"is on another machine, in {os.uname().nodename}:{first}" in refused.said()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd"])
def test_machines_that_were_stopped_resume_from_the_files_that_they_have_together(tmp_path, strategy):
    with Machines(tmp_path, "one", "other") as machines:
        runs = machines.train("--strategy", strategy, "--epochs", 40, "--set", "data.sharding=dynamic")
        runs[0].wait_for(lambda: machines.all_train(4), "training")
        for run in runs:
            run.process.send_signal(signal.SIGTERM)
        assert [run.ended() for run in runs] == [128 + signal.SIGTERM] * 2
        assert all("--resume" in run.said() for run in runs)
        saved = [checkpoint.pieces(each / "checkpoints") for each in machines.directories]
        newest = max(set(saved[0]) & set(saved[1]))
        assert saved[0][newest].keys() | saved[1][newest].keys() == {0, 1, 2, 3}
        machines.directories.reverse()  # learners get other ids than before
        machines.hurry()
        for run in machines.train("--resume"):
            run.finished()
    assert_gathered(machines.directories, 4, 40)
    events = [row for directory in machines.directories for row in rows_of(directory, "event")]
    # Learners that stop leave a few chunks before the last one unused, so they have seen a little less than `newest`.
    (seen,) = [row["samples_seen"] for row in events if row["event"] == "resumed"]
    assert max({0, *saved[0], *saved[1]} - {newest}) < seen <= newest
    assert "go on from the mean" not in "".join(map(logs_of, machines.directories))  # every state was found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd"])
def test_a_machine_that_is_lost_is_left_out_and_the_other_gathers_the_model(tmp_path, strategy):
    with Machines(tmp_path, "one", "other") as machines:
        runs = machines.train("--strategy", strategy, "--epochs", 40)
        runs[0].wait_for(lambda: machines.all_train(4), "training")
        lost = next(index for index, each in enumerate(machines.directories) if trains(each, 0))  # the first learner's
        for pid in [runs[lost].process.pid, *runs[lost].learners()]:
            os.kill(pid, signal.SIGKILL)
        machines.hurry()
        runs[1 - lost].finished()
    left = machines.directories[1 - lost]
    results = results_of(left)
    assert results["learners"] == 2
    assert "model" not in results
    assert checkpoint.complete(left / "checkpoints")[-1].samples_seen == 40 * SAMPLES


@pytest.mark.slow
def test_a_machine_goes_on_alone_from_its_own_files_if_that_is_asked_for(tmp_path):
    with Machines(tmp_path, "one", "other") as machines:
        runs = machines.train("--epochs", 40)
        runs[0].wait_for(lambda: machines.all_train(4), "training")
        for run in runs:
            run.process.send_signal(signal.SIGTERM)
        for run in runs:
            run.ended()
        (left,) = (each for each in machines.directories if not trains(each, 0))  # the other one gathers checkpoints
        samples_seen = max(checkpoint.pieces(left / "checkpoints"))
        machines.hurry()
        alone = ["--learners", 2, "--here", 2, "--rendezvous", machines.address, "--out", left, "--resume"]
        refused = machines.command(*alone)
        assert refused.ended() == 1
        assert f"go on from the learners that saved by --resume {samples_seen}" in refused.said() + logs_of(left)
        machines.command(*alone, samples_seen).finished()
    assert results_of(left)["learners"] == 2
    assert results_of(left)["test"]["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd"])
def test_a_learner_joins_from_a_machine_that_has_nothing(tmp_path, strategy):
    with Machines(tmp_path, "one") as machines:
        (run,) = machines.train("--strategy", strategy, "--epochs", 40)
        run.wait_for(lambda: machines.all_train(2), "training")
        guest = tmp_path / "guest" / "run"
        joining = machines.command("--join", machines.address, "--out", guest)
        joining.wait_for(lambda: trains(guest, 2), "a third learner")
        machines.hurry()
        run.finished()
        joining.finished()
    assert_gathered([*machines.directories, guest], 3, 40)
    assert with_model([*machines.directories, guest]) == machines.directories[0]


def test_machines_with_different_configurations_do_not_train_together(tmp_path):
    with Machines(tmp_path, "one", "other") as machines:
        first = machines.command(
            "paced_digits:PacedDigits", "--learners", 2, "--here", 1, "--rendezvous", machines.address,
            "--out", machines.directories[0],
        )  # fmt: skip
        first.wait_for(lambda: "1 of 2 learners have come" in first.said(), "the first learner")
        second = machines.command(
            "paced_digits:PacedDigits", "--learners", 2, "--here", 1, "--rendezvous", machines.address,
            "--out", machines.directories[1], "--seed", 7,
        )  # fmt: skip
        assert second.ended() == 1
        assert "this rendezvous serves the run 'run " in second.said()
