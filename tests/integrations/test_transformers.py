"""Hugging Face's Trainer with our averaging: equal to its own DDP, everything on the mean, exact after a restart."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

LEARNERS = 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (importlib.util.find_spec("transformers") and importlib.util.find_spec("peft")),
        reason="needs the 'transformers' extra and peft",
    ),
]
PROGRAM = Path(__file__).parent / "programs" / "transformers_runs.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformers")
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(LEARNERS), str(PROGRAM), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def saw(folder):
    return [torch.load(folder / f"saw {rank}.pt", weights_only=True) for rank in range(LEARNERS)]


@pytest.mark.parametrize("name", ["plain", "accumulated"])
def test_allreduce_equals_ddp_and_wraps_nothing(saw, name):
    for each in saw:
        torch.testing.assert_close(each[f"{name} allreduce"], each[f"{name} ddp"], rtol=0, atol=1e-6)
        assert not each[f"{name} wrapped"]
    assert (saw[0]["plain ddp"] - saw[0]["accumulated ddp"]).abs().max() > 1e-3


def test_evaluation_and_the_end_have_the_mean(saw):
    own = [each["own"] for each in saw]
    assert (own[0][-1] - own[1][-1]).abs().max() > 1e-4, "learners differ, or this would prove nothing"
    for each in saw:
        for step, evaluated in zip((8, 16), each["evaluated"][:2], strict=True):
            mean = (own[0][step - 1] + own[1][step - 1]) / 2
            torch.testing.assert_close(evaluated, mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(each["dpsgd"], (own[0][-1] + own[1][-1]) / 2, rtol=0, atol=1e-6)
        assert each["losses"][-1] == pytest.approx(each["evaluated again"])


def test_a_checkpoint_has_the_mean_of_the_learners_beside_it(folder):
    checkpoint = folder / "dpsgd" / "checkpoint-8"
    mean = load_file(checkpoint / "model.safetensors")
    learners = [torch.load(checkpoint / f"learner-{rank}.pt", weights_only=True) for rank in range(LEARNERS)]
    for name, value in mean.items():
        expected = sum(learner["weights"][name] for learner in learners) / LEARNERS
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


def test_a_run_that_is_resumed_continues_exactly(saw):
    for each in saw:
        assert torch.equal(each["resumed"], each["dpsgd"])
        assert each["resumed steps"] == 16


def test_the_best_model_stays_loaded_and_is_saved_by_one_process(folder, saw):
    assert [Path(each["best checkpoint"]).name for each in saw] == ["checkpoint-8"] * 2
    best = load_file(folder / "best" / "checkpoint-8" / "model.safetensors")
    saved = load_file(folder / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], best[name]) for name in best)
    last = load_file(folder / "best" / "checkpoint-16" / "model.safetensors")
    assert any(not torch.equal(last[name], best[name]) for name in best)
    assert torch.equal(saw[0]["best"], saw[1]["best"])
    assert saw[0]["best predicted"] == saw[1]["best predicted"]


def test_a_subclass_trains_asynchronously_and_each_learner_logs_its_own_loss(saw):
    assert torch.equal(saw[0]["adpsgd"], saw[1]["adpsgd"])
    assert [each["adpsgd steps"] for each in saw] == [8, 8]
    assert len(saw[0]["logged"]) == len(saw[1]["logged"]) == 2
    assert saw[0]["logged"] != saw[1]["logged"]


def test_only_adapters_travel(folder, saw):
    whole, adapters = saw[0]["told"]
    assert whole == "learners average 3888 of 3888 parameters (0.0156 MB)"
    assert adapters == "learners average 128 of 4016 parameters (0.000512 MB)"
    assert torch.equal(saw[0]["peft"], saw[1]["peft"])
    assert all(each["frozen kept"] for each in saw)
    saved = torch.load(folder / "peft" / "checkpoint-10" / "learner-0.pt", weights_only=True)
    assert sum(value.numel() for name, value in saved["weights"].items() if "lora" in name) == 128
    assert not any("wte" in name for name in saved["weights"])


def test_a_failure_is_told_to_the_others(saw):
    assert saw[1]["failure"] == "ZeroDivisionError: this batch is bad"
    assert saw[0]["failure"] == "PeerLostError: lost learner 1: it gave up (ZeroDivisionError: this batch is bad)"
