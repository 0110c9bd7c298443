"""A slowed learner's step is a given factor of its step at full speed, on a virtual clock and in real runs."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from roundelay.errors import DroppedError
from roundelay.training.metrics import read_rows
from roundelay.training.slowdown import Slowdown, ThisMachine, Work

PROGRAMS = Path(__file__).parents[1] / "integration" / "programs"


class Core:
    """A clock that only computing, waiting, sleeping, and being ready without a core move."""

    def __init__(self, factor: float, check=lambda: None, *, learners_per_core=1.0) -> None:
        self.now_s = self.waited_s = self.core_s = self.ready_s = 0.0
        self.learners_per_core = learners_per_core
        self.slowdown = Slowdown(factor, check, machine=self)

    def work(self) -> Work:
        return Work(self.core_s, self.now_s - self.core_s - self.ready_s)

    def compute(self, seconds: float) -> None:
        """Use the core, which other learners use in turn."""
        self.core_s += seconds
        self.ready_s += (self.learners_per_core - 1) * seconds
        self.now_s += self.learners_per_core * seconds

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.waited_s += seconds

    def steps(self, count: int, *, forward_s=0.06, idle_s=0.0, update_s=0.04, waits_s=0.0) -> list[float]:
        """Take steps; the duration of each without waiting."""
        durations = []
        self.slowdown.begin(self.waited_s)
        for _ in range(count):
            began = self.now_s - self.waited_s
            self.sleep(idle_s)
            self.compute(forward_s)
            self.wait(waits_s)
            self.slowdown.pause(self.waited_s)
            self.compute(update_s)
            self.wait(waits_s)
            self.slowdown.end(self.waited_s)
            durations.append(self.now_s - self.waited_s - began)
        return durations


@pytest.mark.parametrize("waits_s", [0.0, 0.5])
@pytest.mark.parametrize("learners_per_core", [1, 2, 3.5])
@pytest.mark.parametrize("idle_s", [0.0, 0.2])
def test_every_step_takes_factor_times_its_time_and_waiting_for_others_is_not_stretched(
    waits_s, learners_per_core, idle_s
):
    unslowed = Core(1, learners_per_core=learners_per_core).steps(5, waits_s=waits_s, idle_s=idle_s)
    slowed = Core(10, learners_per_core=learners_per_core).steps(5, waits_s=waits_s, idle_s=idle_s)
    # The pause of a step makes up for the update of the step before, so the first step is shorter by one update.
    assert slowed[0] == pytest.approx(10 * unslowed[0] - 9 * 0.04 * learners_per_core)
    assert slowed[1:] == pytest.approx([10 * each for each in unslowed[1:]])


def test_a_slowed_learner_uses_the_core_as_much_as_an_unslowed_one():
    unslowed, slowed = Core(1, learners_per_core=2), Core(10, learners_per_core=2)
    unslowed.steps(100)
    slowed.steps(100)
    assert slowed.core_s / slowed.now_s == pytest.approx(unslowed.core_s / unslowed.now_s)


def test_without_a_factor_nothing_is_measured_and_nothing_is_stretched():
    core = Core(1)
    core.work = None
    assert core.steps(30, forward_s=0.02) == pytest.approx([0.06] * 30)


def test_a_checkpoint_between_two_steps_is_not_stretched():
    core = Core(10)
    core.steps(3)
    core.compute(5.0)  # no step: `steps` begins again after it
    assert core.steps(1) == pytest.approx([1.0])


@pytest.mark.parametrize("idle_s", [0.0, 0.1])
def test_a_learner_that_the_others_gave_up_does_not_pause_to_the_end(idle_s):
    def check():
        raise DroppedError("gone")

    core = Core(1000, check)
    with pytest.raises(DroppedError):
        core.steps(1, forward_s=0.1 - idle_s, idle_s=idle_s)
    assert core.now_s < 5.0


def test_this_machine_tells_computing_from_sleeping():
    machine = ThisMachine()
    before = machine.work()
    machine.compute(0.05)
    computed = machine.work()
    machine.sleep(0.05)
    slept = machine.work()
    assert computed.core_s - before.core_s == pytest.approx(0.05, abs=0.005)
    assert computed.idle_s - before.idle_s == pytest.approx(0, abs=0.01)
    assert slept.core_s - computed.core_s == pytest.approx(0, abs=0.005)
    assert slept.idle_s - computed.idle_s == pytest.approx(0.05, abs=0.01)


def own_step_times(folder: Path, learner: int) -> list[float]:
    """Seconds of every step without waiting, from the totals in consecutive rows."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row.get("learner") == learner]
    totals = [
        (row["steps"], row["steps"] * (row["step_s"] - row["wait_s"])) for row in rows if row["kind"] == "learner"
    ]
    return [after[1] - before[1] for before, after in itertools.pairwise(totals) if after[0] == before[0] + 1]


def mean_step_s(folder: Path, task: str, learners: int, factor: int, *words: str) -> list[float]:
    """Train with learner 0 slowed; the mean time of a step of every learner without waiting for others."""
    settings = {"metrics.every_s": 0, "checkpoint.every_epochs": 100, "data.sharding": "dynamic"}
    command = ["train", task, "--out", str(folder), "--learners", str(learners), "--slow", f"0:{factor}", *words]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    ended = subprocess.run(
        [sys.executable, "-m", "roundelay", *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(PROGRAMS), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [statistics.mean(own_step_times(folder, learner)) for learner in range(learners)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "epochs"),
    [
        ("adpsgd", "2.3"),
        pytest.param("dpsgd", "0.7", marks=pytest.mark.slow),
        pytest.param("allreduce", "0.7", marks=pytest.mark.slow),
    ],
)
def test_slow_0_10_is_ten_times_slower_than_the_same_learner_unslowed(tmp_path, strategy, epochs):
    """Steps sleep for 50 ms, half of it for the data, so that the load of the machine hardly disturbs the comparison."""
    words = ["--strategy", strategy, "--epochs", epochs, "--set", "data.batch=20"]
    unslowed, slowed = (mean_step_s(tmp_path / str(each), "steady:SteadyDigits", 2, each, *words) for each in (1, 10))
    assert slowed[0] / unslowed[0] == pytest.approx(10, rel=0.15)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_slow_0_10_is_ten_times_slower_when_learners_compete_for_a_core(tmp_path):
    """Two learners, each with enough work for a whole core, on one core.

    Other programs may use the core in one of the two runs more than in the other. This changes the steps of both learners
    of the run, so learner 0 is compared with learner 1 of the same run. Learner 1 is as fast as without the slowdown.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        runs = [mean_step_s(tmp_path / str(each), "busy:BusyDigits", 2, each, "--epochs", "3") for each in (1, 10)]
    finally:
        os.sched_setaffinity(0, cores)
    unslowed, slowed = (own / peers for own, peers in runs)
    assert slowed / unslowed == pytest.approx(10, rel=0.15)
    assert runs[1][1] / runs[0][1] == pytest.approx(1, rel=0.5)
