from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roundelay.cluster.learner_process import LearnerProcess, Program

SECRET = "5e" * 32


def wait_until(happened, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(pid):
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@pytest.fixture
def started(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_SECRET", SECRET)
    monkeypatch.setenv("RANK", "7")
    processes = []

    def start(code, **changes):
        program = Program([sys.executable, "-c", code], {"OWN": "yes"}, tmp_path, **changes)
        process = LearnerProcess(program, "host-1-0", 3, {"LOCAL_RANK": "1"})
        processes.append(process)
        process.start(joins=True)
        return process

    yield start
    for each in processes:
        each.end()


def test_a_process_knows_its_learner_and_neither_another_run_nor_the_secret(started):
    process = started("import os; print(sorted(os.environ.items()))")
    wait_until(lambda: process.exit_code == 0)
    said = process.log.read_text()
    for name, value in {"ROUNDELAY_LEARNER": "3", "ROUNDELAY_PROCESS": "host-1-0", "ROUNDELAY_JOINS": "1"}.items():
        assert f"('{name}', '{value}')" in said
    assert "('OWN', 'yes')" in said
    assert SECRET not in said
    assert "RANK', '7'" not in said


def test_a_process_that_fails_is_described_by_the_last_line_of_its_log(started):
    process = started("print('a'); print('the reason'); raise SystemExit(3)")
    wait_until(lambda: process.exit_code is not None)
    assert process.how_it_ended() == "exit code 3: the reason"
    assert process.log.name == "learner-3.log"


def test_a_signal_to_a_process_that_has_ended_has_no_effect(started):
    process = started("import time; time.sleep(60)")
    process.send(signal.SIGKILL)
    wait_until(lambda: process.exit_code is not None)
    process.send(signal.SIGTERM)
    assert process.how_it_ended() == "killed by SIGKILL"


def test_a_signal_reaches_the_process_only_and_sigkill_all_that_it_has_started(started, tmp_path):
    child = "import time; time.sleep(60)"
    process = started(
        f"import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, lambda *_: print('caught', flush=True));"
        f"print('child', subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); time.sleep(60)"
    )
    wait_until(lambda: "child" in process.log.read_text())
    pid = int(process.log.read_text().split()[1])
    process.send(signal.SIGTERM)
    wait_until(lambda: "caught" in process.log.read_text())
    os.kill(pid, 0)  # the child lives
    process.end()
    wait_until(lambda: ended(pid))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_gets_the_signal_that_was_asked_for_when_its_launcher_is_killed(tmp_path, number):
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', os.getpid(), flush=True)\n"
        "time.sleep(60)"
    )
    launcher = (
        "import sys, time, pathlib\n"
        "from roundelay.cluster.learner_process import LearnerProcess, Program\n"
        f"program = Program([sys.executable, '-c', {code!r}], {{}}, pathlib.Path({str(tmp_path)!r}), when_orphaned={number:d})\n"
        "LearnerProcess(program, 'name', 0, {}).start(joins=False)\n"
        "time.sleep(60)"
    )
    log = tmp_path / "learner-0.log"
    process = subprocess.Popen([sys.executable, "-c", launcher])
    wait_until(lambda: log.exists() and "\n" in log.read_text())
    pid = int(log.read_text().split()[1])
    process.kill()
    process.wait()
    wait_until(lambda: ended(pid))
    assert ("saved" in log.read_text()) == (number == signal.SIGTERM)
