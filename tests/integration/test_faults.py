"""Learner 2 of four dies, freezes, raises, is interrupted, is slow or stops early. The others never hang, and name it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roundelay.bench.local import local_environment
from roundelay.transport.heartbeats import LOST_AFTER_S

PROGRAM = Path(__file__).parent / "programs" / "faults.py"
LEARNERS, FAULTY, STEPS = 4, 2, 150
PATIENCE_S = 90.0

pytestmark = pytest.mark.timeout(200)


class Run:
    """Runs four processes to their end, and keeps the exit code and the output of each."""

    def __init__(self, strategy: str, fault: str) -> None:
        processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), strategy, fault],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for environment in local_environment(LEARNERS)
        ]
        survivors = [process for rank, process in enumerate(processes) if rank != FAULTY]
        deadline = time.monotonic() + PATIENCE_S
        try:
            while any(p.poll() is None for p in survivors) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.hung = [rank for rank, p in enumerate(processes) if rank != FAULTY and p.poll() is None]
            if fault != "freeze" and not self.hung:
                processes[FAULTY].wait(timeout=20)
        finally:
            for process in processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
        ended = [process.communicate() for process in processes]
        self.out, self.err = ([each[i] for each in ended] for i in (0, 1))
        self.codes = [process.returncode for process in processes]
        self.survivors = [rank for rank in range(LEARNERS) if rank != FAULTY]

    def seconds_to_notice(self, rank: int) -> float:
        """Seconds from the fault to the error that survivor `rank` raised."""
        fault_at, lost_at = (float(self.out[each].split(" at ")[1].split()[0]) for each in (FAULTY, rank))
        return lost_at - fault_at


@pytest.mark.parametrize("fault", ["kill", pytest.param("freeze", marks=pytest.mark.slow)])
def test_adpsgd_goes_on_without_a_dead_learner_and_names_it(fault):
    run = Run("adpsgd", fault)
    assert not run.hung
    for rank in run.survivors:
        assert run.codes[rank] == 0, run.err[rank]
        assert run.out[rank] == f"finished {STEPS}\n"
        assert f"learner {rank} has lost learner {FAULTY}: " in run.err[rank]


def test_a_group_that_never_forms_does_not_hang_the_others():
    run = Run("super-learners", "never-starts")
    assert not run.hung
    assert run.out[3].startswith(f"lost {FAULTY} at "), run.err[3]
    assert run.codes[3] == 7, run.err[3]
    for rank in (0, 1):
        assert run.out[rank] == f"finished {STEPS}\n", run.err[rank]


@pytest.mark.slow
def test_learners_that_wait_for_one_that_never_starts_end_with_an_error():
    run = Run("allreduce", "never-starts")
    assert not run.hung
    assert all(run.codes[rank] == 7 for rank in run.survivors), run.err


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("dpsgd", "kill"),
        ("allreduce", "freeze"),
        pytest.param("dpsgd", "freeze", marks=pytest.mark.slow),
        pytest.param("allreduce", "kill", marks=pytest.mark.slow),
        pytest.param("delay-by-one", "kill", marks=pytest.mark.slow),
        pytest.param("delay-by-one", "freeze", marks=pytest.mark.slow),
    ],
)
def test_synchronous_survivors_raise_an_error_that_names_the_peer(strategy, fault):
    run = Run(strategy, fault)
    assert not run.hung
    for rank in run.survivors:
        # The first learner to notice leaves, so another one may lose that learner first. The log names the faulty one.
        assert run.codes[rank] == 7, run.err[rank]
        assert run.out[rank].startswith("lost ")
        assert run.seconds_to_notice(rank) < LOST_AFTER_S + 5  # the machine may be busy
        assert f"has lost learner {FAULTY}: " in run.err[rank] or f"lost learner {FAULTY}: " in run.err[rank]


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [("dpsgd", "interrupt"), pytest.param("allreduce", "raise", marks=pytest.mark.slow)],
)
def test_a_learner_that_raises_or_is_interrupted_does_not_hang_the_others(strategy, fault):
    run = Run(strategy, fault)
    assert not run.hung
    assert run.codes[FAULTY] == {"interrupt": 130, "raise": 1}[fault]
    assert all(run.codes[rank] == 7 for rank in run.survivors), run.err


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        pytest.param("dpsgd", "early", marks=pytest.mark.slow),
        ("adpsgd", "early"),
        pytest.param("allreduce", "early", marks=pytest.mark.slow),
        pytest.param("delay-by-one", "early", marks=pytest.mark.slow),
        pytest.param("dpsgd", "slow", marks=pytest.mark.slow),
        pytest.param("allreduce", "slow", marks=pytest.mark.slow),
        pytest.param("adpsgd", "slow", marks=pytest.mark.slow),
    ],
)
def test_an_early_stop_or_a_slow_step_is_no_fault(strategy, fault):
    run = Run(strategy, fault)
    assert not run.hung
    assert run.codes == [0] * LEARNERS, run.err
    assert all(run.out[rank] == f"finished {STEPS}\n" for rank in run.survivors)
    assert run.out[FAULTY].endswith("finished 41\n" if fault == "early" else f"finished {STEPS}\n")
