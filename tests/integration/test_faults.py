"""Learner 2 of four dies, freezes, raises, is interrupted, is slow or stops early: nobody hangs, and all say who is gone."""

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
from roundelay.transport.heartbeats import SILENCE_S

PROGRAM = Path(__file__).parent / "programs" / "faults.py"
LEARNERS, FAULTY, STEPS = 4, 2, 150
PATIENCE_S = 90.0

pytestmark = pytest.mark.timeout(200)


class Run:
    """Four processes; afterwards, of each, its exit code and what it said."""

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
        """From the fault to the error that a survivor raised."""
        fault_at, lost_at = (float(self.out[each].split(" at ")[1].split()[0]) for each in (FAULTY, rank))
        return lost_at - fault_at


@pytest.mark.parametrize("fault", ["kill", pytest.param("freeze", marks=pytest.mark.slow)])
def test_adpsgd_goes_on_without_the_dead_and_says_who_is_gone(fault):
    run = Run("adpsgd", fault)
    assert not run.hung
    for rank in run.survivors:
        assert run.codes[rank] == 0, run.err[rank]
        assert run.out[rank] == f"finished {STEPS}\n"
        assert f"learner {rank} has lost learner {FAULTY}: " in run.err[rank]


def test_a_group_that_never_forms_hangs_nobody():
    run = Run("super-learners", "never-starts")
    assert not run.hung
    assert run.out[3].startswith(f"lost {FAULTY} at "), run.err[3]
    assert run.codes[3] == 7, run.err[3]
    for rank in (0, 1):
        assert run.out[rank] == f"finished {STEPS}\n", run.err[rank]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "allreduce by gloo"])
def test_whoever_waits_for_all_to_begin_ends_in_order_if_one_never_does(strategy):
    run = Run(strategy, "never-starts")
    assert not run.hung
    assert all(run.codes[rank] == 7 for rank in run.survivors), run.err


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("dpsgd", "kill"),
        ("allreduce", "freeze"),
        pytest.param("dpsgd", "freeze", marks=pytest.mark.slow),
        pytest.param("allreduce", "kill", marks=pytest.mark.slow),
        pytest.param("allreduce by gloo", "freeze", marks=pytest.mark.slow),
        pytest.param("allreduce by gloo", "kill", marks=pytest.mark.slow),
        pytest.param("delay-by-one", "kill", marks=pytest.mark.slow),
        pytest.param("delay-by-one", "freeze", marks=pytest.mark.slow),
    ],
)
def test_synchronous_survivors_raise_an_error_that_names_the_peer(strategy, fault):
    run = Run(strategy, fault)
    assert not run.hung
    for rank in run.survivors:
        # The first to notice leaves, so that the others may hear of it first; somebody names the culprit to each of them.
        assert run.codes[rank] == 7, run.err[rank]
        assert run.out[rank].startswith("lost ")
        assert run.seconds_to_notice(rank) < SILENCE_S + 5  # the others may be starting up, or short of processors
        assert f"has lost learner {FAULTY}: " in run.err[rank] or f"lost learner {FAULTY}: " in run.err[rank]


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [("dpsgd", "interrupt"), pytest.param("allreduce", "raise", marks=pytest.mark.slow)],
)
def test_a_learner_that_raises_or_is_interrupted_leaves_nobody_hanging(strategy, fault):
    run = Run(strategy, fault)
    assert not run.hung
    assert run.codes[FAULTY] == {"interrupt": 130, "raise": 1}[fault]
    assert all(run.codes[rank] == 7 for rank in run.survivors), run.err


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("dpsgd", "early"),
        pytest.param("adpsgd", "early", marks=pytest.mark.slow),
        pytest.param("allreduce", "early", marks=pytest.mark.slow),
        pytest.param("allreduce by gloo", "early", marks=pytest.mark.slow),
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
