"""`roundelay chaos` with real processes and the defaults of a run: faults that happen, faults that do not, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roundelay.training import checkpoint

PATIENCE_S = 200.0
COMMAND = [sys.executable, "-m", "roundelay", "chaos", "tiny", "--learners", "3"]

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)


def run_as_printed(command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        command,
        shell=True,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
def test_ctrl_c_ends_both_runs_and_the_printed_command_finishes_the_one_under_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--epochs", "8", "--slow", "0:10,1:10,2:10", "--kill", "2@60s", "--out", "my chaos"]
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = Path("my chaos/undisturbed")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not list(folder.glob("checkpoints/*/manifest.json")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 130
    assert "stopped and saved; go on with:" in said
    assert not Path("my chaos/disturbed").exists()
    saved = checkpoint.choose(folder / "checkpoints")
    assert sorted(saved.files) == [0, 1, 2]
    printed = said.rstrip("\n").rpartition("\n")[2].strip()
    assert printed == "roundelay train --out 'my chaos/undisturbed' --resume"
    ended = run_as_printed(printed + " --slow ''")  # at full speed, to be quick
    assert ended.returncode == 0, ended.stderr
    assert f"after {saved.samples_seen:,} samples" in ended.stderr
    assert json.loads((folder / "results.json").read_text())["finished"]


@pytest.mark.slow
def test_a_kill_that_happens_is_reported_and_one_that_does_not_fails_the_command(tmp_path):
    words = ["--epochs", "25", "--slow", "0:5,1:5,2:5", "--kill", "2@1s", "--kill", "1@500s", "--json"]
    ended = subprocess.run(
        [*COMMAND, *words, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "1 of 2 faults did not happen (--kill 1@500s: the run had ended before)" in ended.stderr.splitlines()[-1]
    result = json.loads(ended.stdout)
    happened, not_happened = result["faults"]
    assert happened["happened_s"] >= 1
    assert happened["reason"] is None
    assert not_happened["happened_s"] is None
    assert result["disturbed"]["finished"]
    assert [event["event"] for event in result["disturbed"]["events"]] == ["died", "recovered"]
    assert 'sharding = "static"' in (tmp_path / "out" / "disturbed" / "config.toml").read_text()
