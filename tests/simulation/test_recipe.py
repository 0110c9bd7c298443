"""A simulated run is a run: the same directory, and for synchronous strategies the same model."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from roundelay.simulation.compute import constant, slowed
from roundelay.simulation.network import Links
from roundelay.simulation.recipe import SimulatedRun
from roundelay.training import recipes
from roundelay.training.checkpoint import complete
from roundelay.training.config import Config
from roundelay.training.metrics import read_rows
from roundelay.training.run_result import RunResult
from roundelay.weights.serialization import read_state

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**settings: str) -> Config:
    defaults = {"budget.epochs": "2", "checkpoint.every_epochs": "1"}
    return recipes.resolve(recipes.table_of("tiny"), (defaults | settings).items())


STEADY = constant(0.1)


def simulated(folder, config, compute=STEADY) -> SimulatedRun:
    folder.mkdir()
    run = SimulatedRun(config, folder, Links(latency_s=0.001), compute)
    run.run()
    return run


@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd", "allreduce", "delay-by-one", "delay-by-one-gradients"])
def test_every_strategy_learns_and_leaves_a_run_that_can_be_read(tmp_path, strategy):
    simulated(tmp_path / "run", config(strategy=strategy, **{"budget.epochs": "4"}))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["simulated"]
    assert results["valid"]["accuracy"] > 0.8
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert {row["kind"] for row in rows} == {"learner", "evaluation"}
    assert {row["learner"] for row in rows if row["kind"] == "learner"} == {0, 1, 2, 3}
    again = RunResult.read(tmp_path / "run").figures("test")
    assert again["loss"] == pytest.approx(results["test"]["loss"], rel=1e-5)


def test_super_learners_too(tmp_path):
    run = simulated(tmp_path / "run", config(group_size="2"))
    first, second = (learner.state()["module"] for learner in run.learners[:2])
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_equal_seeds_give_equal_runs_bit_for_bit(tmp_path):
    for name in "ab":
        simulated(tmp_path / name, config(slow="0:3"), slowed(constant(0.1), {0: 3.0}))
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_everyone_waits_for_a_straggler_and_asynchronous_learners_do_not(tmp_path):
    compute = slowed(constant(0.1), {0: 10.0})
    waiting = simulated(tmp_path / "allreduce", config(strategy="allreduce"), compute)
    free = simulated(tmp_path / "adpsgd", config(), compute)
    steps = -(-len(waiting.task) * 2 // 64)
    assert waiting.clock.now() == pytest.approx(steps * 1.0, rel=0.1)
    assert free.clock.now() < waiting.clock.now() / 3
    samples = {
        row["learner"]: row["samples"]
        for row in read_rows(tmp_path / "adpsgd/metrics.jsonl")
        if "samples" in row and "learner" in row
    }
    assert samples[0] < samples[1] / 5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_dpsgd_equals_the_real_run_bit_for_bit_and_the_others_to_1e_6(tmp_path):
    for strategy in ("dpsgd", "allreduce", "delay-by-one"):
        own = dataclasses.replace(config(strategy=strategy))
        run = simulated(tmp_path / f"simulated-{strategy}", own)
        real = tmp_path / f"real-{strategy}"
        words = ["train", "tiny", "--strategy", strategy, "--epochs", "2", "--set", "checkpoint.every_epochs=1"]
        subprocess.run([sys.executable, "-m", "roundelay", *words, "--out", str(real)], check=True, timeout=100)
        saved = complete(real / "checkpoints")[-1]
        for learner in saved.files:
            expected = read_state(saved.path(learner))["module"]
            error = 0 if strategy == "dpsgd" else 1e-6
            torch.testing.assert_close(dict(run.learners[learner].module.state_dict()), expected, rtol=0, atol=error)
        torch.testing.assert_close(
            load_file(tmp_path / f"simulated-{strategy}/model.safetensors"),
            load_file(real / "model.safetensors"),
            rtol=0,
            atol=1e-6,
        )
