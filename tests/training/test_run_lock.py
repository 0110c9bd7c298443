"""One command at a time trains in the directory of a run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from roundelay.errors import ConfigError
from roundelay.training import run_lock
from roundelay.training.run_lock import hold

HOLD = "import sys, time; from pathlib import Path; from roundelay.training.run_lock import hold\n"
HOLD += "with hold(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"


def test_a_second_command_is_refused_and_told_which_process_has_the_lock(tmp_path):
    with hold(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{platform.node()} {os.getpid()}\n"
        with (
            pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on {platform.node()}; stop it"),
            hold(tmp_path),
        ):
            pass
    with hold(tmp_path):
        pass


def test_supervisors_of_several_machines_share_the_lock_and_a_run_on_one_machine_is_refused(tmp_path):
    machine = hold(tmp_path, shared=True)
    with machine, hold(tmp_path, shared=True), pytest.raises(ConfigError, match="is in use"), hold(tmp_path):
        pass


def test_a_lock_does_not_survive_kill_9(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with pytest.raises(ConfigError, match=f"process {process.pid}"), hold(tmp_path):
            pass
        process.kill()
    with hold(tmp_path):
        pass


def test_the_lock_lasts_while_a_learner_of_a_killed_supervisor_still_saves(tmp_path):
    with hold(tmp_path):
        learner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=run_lock.held())
    (tmp_path / "lock").write_text(f"{platform.node()} 999999999\n")  # its supervisor is gone
    with (
        pytest.raises(ConfigError, match=r"learners of process 999999999, which has ended; .* try again"),
        hold(tmp_path),
    ):
        pass
    learner.communicate(b"\n")
    with hold(tmp_path):
        pass
    assert run_lock.held() == ()
