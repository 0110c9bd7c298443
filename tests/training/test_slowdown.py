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
from roundelay.training.slowdown import MEASURED_STEPS, Slowdown

PROGRAMS = Path(__file__).parents[1] / "integration" / "programs"


class Machine:
    """A clock that only computing, waiting and sleeping move."""

    def __init__(self, factor: float, check=lambda: None) -> None:
        self.now_s = self.waited_s = 0.0
        self.slowdown = Slowdown(factor, check, now=lambda: self.now_s, sleep=self.compute)

    def compute(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.waited_s += seconds

    def steps(self, count: int, *, forward_s=0.06, update_s=0.04, waits_s=0.0) -> list[float]:
        """Take steps; the duration of each without waiting."""
        durations = []
        self.slowdown.begin(self.waited_s)
        for _ in range(count):
            began = self.now_s - self.waited_s
            self.compute(forward_s)
            self.wait(waits_s)
            self.slowdown.pause(self.waited_s)
            self.compute(update_s)
            self.wait(waits_s)
            self.slowdown.end(self.waited_s)
            durations.append(self.now_s - self.waited_s - began)
        return durations


@pytest.mark.parametrize("waits_s", [0.0, 0.5])
def test_the_whole_step_is_stretched_and_waiting_for_others_is_not(waits_s):
    machine = Machine(10)
    assert machine.steps(MEASURED_STEPS, waits_s=waits_s) == pytest.approx([0.1] * MEASURED_STEPS)
    assert machine.steps(5, waits_s=waits_s) == pytest.approx([1.0] * 5)


def test_a_sleeper_that_gets_a_core_at_once_is_as_slow_as_asked():
    machine = Machine(10)
    machine.steps(MEASURED_STEPS)
    assert machine.steps(5, forward_s=0.02) == pytest.approx([1.0] * 5)


def test_the_first_slow_step_of_a_process_does_not_count():
    machine = Machine(10)
    machine.steps(1, forward_s=5.0)
    machine.steps(MEASURED_STEPS - 1)
    assert machine.steps(3) == pytest.approx([1.0] * 3)


def test_without_a_factor_nothing_is_stretched():
    machine = Machine(1)
    assert machine.steps(30, forward_s=0.02) == pytest.approx([0.06] * 30)


def test_a_learner_that_the_others_gave_up_does_not_sleep_to_the_end():
    def check():
        raise DroppedError("gone")

    machine = Machine(1000, check)
    machine.steps(MEASURED_STEPS)
    before = machine.now_s
    with pytest.raises(DroppedError):
        machine.steps(1)
    assert machine.now_s - before < 5.0


def own_step_times(folder: Path, learner: int) -> list[float]:
    """Seconds of every step without waiting, from the totals in consecutive rows."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row.get("learner") == learner]
    totals = [
        (row["steps"], row["steps"] * (row["step_s"] - row["wait_s"])) for row in rows if row["kind"] == "learner"
    ]
    return [after[1] - before[1] for before, after in itertools.pairwise(totals) if after[0] == before[0] + 1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "epochs"), [("adpsgd", 2.3), ("dpsgd", 0.7), pytest.param("allreduce", 0.7, marks=pytest.mark.slow)]
)
def test_slow_0_10_is_ten_times_slower_than_the_same_learner_unslowed(tmp_path, strategy, epochs):
    """Steps sleep for 50 ms, half of it for the data, so that the load of the machine hardly disturbs the comparison."""
    medians = []
    for factor in (1, 10):
        folder = tmp_path / str(factor)
        settings = {"data.batch": 20, "metrics.every_s": 0, "checkpoint.every_epochs": 100, "budget.epochs": epochs}
        words = ["train", "steady:SteadyDigits", "--out", str(folder), "--learners", "2", "--strategy", strategy]
        words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        ended = subprocess.run(
            [sys.executable, "-m", "roundelay", *words, "--slow", f"0:{factor}"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(PROGRAMS), *sys.path])},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        medians.append(statistics.median(own_step_times(folder, 0)[MEASURED_STEPS:]))
    assert medians[1] / medians[0] == pytest.approx(10, rel=0.15)
