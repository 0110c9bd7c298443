"""A disk that is full for a while costs rows and checkpoints, not the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roundelay.training import checkpoint, run_directory
from roundelay.training.metrics import read_rows

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["adpsgd", pytest.param("dpsgd", marks=pytest.mark.slow)])
def test_a_full_disk_costs_rows_and_checkpoints_and_not_the_run(tmp_path, strategy):
    """The learners cannot write while they take their steps 40 to 119 of about 200; boundaries are 50 steps apart."""
    folder = tmp_path / "run"
    settings = ["metrics.every_s=0.05", "checkpoint.every_epochs=2.5", "checkpoint.keep=100"]
    words = ["--learners", "2", "--strategy", strategy, "--epochs", "10", "--out", str(folder)]
    words += [word for setting in settings for word in ("--set", setting)]
    ended = subprocess.run(
        [sys.executable, "-m", "roundelay", "train", "full_disk:FullDisk", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(PROGRAMS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert (folder / run_directory.RESULTS).exists()
    rows = [row for row in read_rows(folder / run_directory.METRICS) if row["kind"] == "learner"]
    assert not any(
        row["event"] in ("died", "dropped") for row in read_rows(folder / run_directory.METRICS) if "event" in row
    )
    for learner in (0, 1):
        steps = [row["steps"] for row in rows if row["learner"] == learner]
        assert not [step for step in steps if 45 < step < 115], "no row could be written then"
        assert max(steps) > 150
        assert "rows are lost" in (folder / "logs" / f"learner-{learner}.log").read_text()
    assert checkpoint.choose(folder / "checkpoints")
