"""The examples run with the commands of their first lines, and their results are right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(200)


def run(*arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def test_learners_agree_on_the_mean():
    lines = run(str(EXAMPLES / "01_consensus.py")).splitlines()[1:]
    figures = {line[:34].strip(): [float(word) for word in line[34:].split()] for line in lines}
    assert all(mean == 3.5 for mean, _ in figures.values())
    assert figures["DPSGD, one-peer exponential"][1] < 1e-12
    assert figures["DPSGD, random ring"][1] < figures["DPSGD, fixed ring"][1] < 2.29
    assert figures["ADPSGD, learner 0 ten times slower"][1] < 0.1


def test_own_loop_alone():
    assert "accuracy of the mean model 9" in run(str(EXAMPLES / "02_own_loop.py"), "--epochs", "10")


@pytest.mark.parametrize(
    "strategy",
    [
        "adpsgd",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("allreduce", "dpsgd", "dpsgd-ring", "adpsgd-ring", "delay-by-one", "super-learner")
        ),
    ],
)
def test_own_loop_under_torchrun(strategy):
    out = run(
        "-m", "torch.distributed.run", "--nproc-per-node", "4", str(EXAMPLES / "02_own_loop.py"), "--strategy", strategy
    )
    accuracies = [float(text) for text in re.findall(r"accuracy of the mean model ([\d.]+)%", out)]
    assert len(accuracies) == 4
    assert len(set(accuracies)) == 1  # all learners evaluate the same mean model
    assert accuracies[0] > 85


@pytest.mark.slow
def test_the_elastic_loop_runs_unchanged_under_torchrun():
    out = run("-m", "torch.distributed.run", "--nproc-per-node", "3", str(EXAMPLES / "05_elastic_loop.py"))
    accuracies = re.findall(r"mean model: accuracy ([\d.]+)", out)
    assert len(accuracies) == 3
    assert len(set(accuracies)) == 1
    assert float(accuracies[0]) > 0.95


def test_a_sharded_model_under_torchrun():
    out = run("-m", "torch.distributed.run", "--nproc-per-node", "4", str(EXAMPLES / "03_fsdp.py"), "--shards", "2")
    accuracies = [float(text) for text in re.findall(r"accuracy of the mean model ([\d.]+)%", out)]
    assert len(accuracies) == 4
    assert len(set(accuracies)) == 1  # both nodes evaluate the same mean model
    assert accuracies[0] > 85
    assert f"whole model: {65 * 129 + 130 * 10} parameters" in out


def test_own_task(tmp_path):
    words = ["train", "own_task:Sines", "--learners", "2", "--epochs", "10", "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, "-m", "roundelay", *words],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["test"]["accuracy"] > 0.8


def test_the_page_about_own_tasks_shows_the_example():
    page = (EXAMPLES.parent / "docs" / "your-own-task.md").read_text()
    assert (EXAMPLES / "own_task.py").read_text() in page


@pytest.fixture
def verses(tmp_path):
    path = tmp_path / "verses.txt"
    path.write_text(
        "so long as men can breathe or eyes can see,\nso long lives this, and this gives life to thee.\n" * 40
    )
    return str(path)


@pytest.mark.parametrize(
    ("learners", "strategy"),
    [(2, "local-sgd"), *(pytest.param(learners, "adpsgd", marks=pytest.mark.slow) for learners in (1, 2))],
)
def test_nanogpt_loop(learners, strategy, verses):
    """All learners evaluate the same mean model, which has learnt more than how often each letter occurs (2.9 nats)."""
    started = ["-m", "torch.distributed.run", "--nproc-per-node", str(learners)] if learners > 1 else []
    options = ["--strategy", strategy, "--steps", "60", "--width", "32"]
    out = run(*started, str(EXAMPLES / "04_nanogpt_loop.py"), verses, *options)
    losses = re.findall(r"validation loss of the mean model ([\d.]+)", out)
    assert len(losses) == learners
    assert len(set(losses)) == 1
    assert float(losses[0]) < 2.5
