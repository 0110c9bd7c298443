"""Learners as Ray actors on real clusters of this host: results, reports, an actor killed, a node removed, TorchTrainer."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).parent / "programs" / "ray_runs.py"
PATIENCE_S = 800

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install roundelay[ray]")
real_cluster = [needs_ray, pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 60)]


def told(case: str, folder: Path) -> dict:
    """What the driver has printed. Ray starts in a process of its own, so that nothing of it stays in this one."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), case, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT ")) | {"log": ended.stdout + ended.stderr}


def check_consensus(results: dict) -> None:
    """All learners saw the same mean, and it is the mean of their own weights."""
    expected = np.mean([each["own"] for each in results.values()], axis=0)
    for each in results.values():
        assert each["mean"] == next(iter(results.values()))["mean"]
        np.testing.assert_allclose(each["mean"], expected, rtol=1e-12)


def python(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@needs_ray
def test_a_report_outside_of_a_run_is_refused():
    said = python(
        "from roundelay.integrations.ray import report\ntry:\n    report({'loss': 1.0})\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    assert said == "LaunchError report() works in a function that roundelay.integrations.ray.run has started"


class TestOneNode:
    pytestmark = real_cluster

    def test_results_reports_and_errors_come_back(self, tmp_path):
        seen = told("simple", tmp_path)
        check_consensus(seen["results"])
        first = [each["first"] for each in seen["results"].values()]
        assert first[0] == first[1]  # all begin with the weights of the first learner
        assert {learner for learner, _ in seen["reports"]} == {0, 1}
        assert {"steps", "step_s", "exchanges_finished"} <= set(seen["reports"][0][1])
        assert seen["scripted"] == {"0": None, "1": None}
        accuracies = re.findall(r"mean model: accuracy ([\d.]+)", seen["log"])  # of examples/05_elastic_loop.py
        assert len(accuracies) == 2 or "repeated 2x" in seen["log"]  # Ray shows equal lines of two actors once
        assert all(float(each) > 0.95 for each in accuracies)
        assert seen["one"] == {"0": 0}  # learner 1 has raised
        assert "learner 1 is lost: ValueError: as planned" in seen["log"]
        assert "ValueError: as planned" in seen["raised"]

    def test_inside_torch_trainer_the_world_is_its_workers_and_prepare_model_is_refused(self, tmp_path):
        if importlib.util.find_spec("pyarrow") is None:
            pytest.skip("needs ray[train]")
        seen = told("trainer", tmp_path)
        assert [each["rank"] for each in seen["learners"]] == [0, 1]
        for each in seen["learners"]:
            assert (each["size"], each["steps"]) == (2, 10)
            assert each["mean"] == seen["learners"][0]["mean"]
            assert "wrapped in DistributedDataParallel" in each["refused"]


class TestThreeNodes:
    pytestmark = real_cluster

    def test_an_actor_then_a_node_is_lost_and_only_its_learners_are_started_again(self, tmp_path):
        seen = told("faults", tmp_path)
        results = seen["results"]
        assert sorted(results) == ["0", "1", "2", "3"]
        check_consensus(results)
        assert len({each["node"] for each in seen["first"].values()}) == 3  # spread over the nodes
        assert seen["first"]["1"]["pid"] == seen["killed"] != seen["before"]["1"]["pid"]
        assert seen["removed"]
        for learner, result in results.items():
            again = int(learner) in seen["removed"]
            assert (result["pid"] != seen["before"][learner]["pid"]) == again
            assert result["joined"] == (again or learner == "1")
            assert result["node"] != seen["removed_node"]
            assert result["steps"] >= seen["before"][learner]["steps"]  # a learner that joins continues the count
