"""Trainers of TRL take the mixin: equal to their own DDP, and with ADPSGD a slow learner delays no other."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from integration_programs import torchrun, what_each_saw

LEARNERS = 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (importlib.util.find_spec("trl") and importlib.util.find_spec("peft")),
        reason="needs trl and peft: tools/set-up slow",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    torchrun("trl_runs.py", folder, env={"HF_HOME": str(folder / "cache")})
    return folder


@pytest.fixture(scope="module")
def saw(folder):
    return what_each_saw(folder, LEARNERS)


def test_allreduce_equals_the_trainers_own_ddp(saw):
    for each in saw:
        torch.testing.assert_close(each["allreduce"], each["ddp"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("trainer", ["sft", "dpo", "reward"])
def test_all_learners_end_with_the_mean(saw, trainer):
    assert torch.equal(saw[0][trainer], saw[1][trainer])


def test_a_slow_learner_delays_no_other_between_evaluations(saw):
    """8 batches each, 2 a step, an evaluation at step 4: process 1 sleeps 0.1 s in every batch."""
    fast, slow = (each["times"] for each in saw)
    assert len(fast) == len(slow) == 8
    assert fast[-1] < slow[-1] - 0.3


def test_each_learner_logs_its_own_figures_and_all_evaluate_the_mean(folder, saw):
    losses = [[entry["loss"] for entry in each["sft logged"]] for each in saw]
    assert len(losses[0]) == 2
    assert losses[0] != losses[1]
    assert [entry["num_tokens"] for entry in saw[0]["sft logged"]] == [104, 208], "its own 8 rows of 13 tokens, twice"
    assert saw[0]["dpo logged"] != saw[1]["dpo logged"]
    assert saw[0]["sft evaluated"] == saw[1]["sft evaluated"]
    assert (folder / "Slow" / "checkpoint-4" / "adapter_model.safetensors").is_file()
    assert (folder / "Slow" / "checkpoint-4" / "learner-1.pt").is_file()
