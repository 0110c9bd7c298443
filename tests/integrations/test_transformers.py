"""Hugging Face's Trainer with our averaging: equal to its own DDP, everything on the mean, exact after a restart."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from integration_programs import torchrun, what_each_saw
from safetensors.torch import load_file

LEARNERS = 2
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (importlib.util.find_spec("transformers") and importlib.util.find_spec("peft")),
        reason="needs the 'transformers' extra and peft",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformers")
    torchrun("transformers_runs.py", folder, page="transformers")
    return folder


@pytest.fixture(scope="module")
def saw(folder):
    return what_each_saw(folder, LEARNERS)


@pytest.mark.parametrize("name", ["plain", "accumulated", "bfloat16"])
def test_allreduce_equals_ddp_and_wraps_nothing(saw, name):
    for each in saw:
        torch.testing.assert_close(each[f"{name} allreduce"], each[f"{name} ddp"], rtol=0, atol=1e-6)
        assert not each[f"{name} wrapped"]
    assert (saw[0]["plain ddp"] - saw[0]["accumulated ddp"]).abs().max() > 1e-3


def test_accumulated_gradients_are_reduced_once_a_step(saw):
    assert saw[0]["plain bytes"] == 2 * saw[0]["accumulated bytes"] > 0


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
    checkpoint = folder / "dpsgd" / "checkpoint-16"
    mean = load_file(checkpoint / "model.safetensors")
    learners = [torch.load(checkpoint / f"learner-{rank}.pt", weights_only=True) for rank in range(LEARNERS)]
    for name, value in mean.items():
        expected = sum(learner["module"][name] for learner in learners) / LEARNERS
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


def test_a_run_that_is_resumed_continues_exactly(saw):
    for each in saw:
        assert torch.equal(each["resumed"], each["dpsgd"])
        assert each["resumed steps"] == 16


def test_a_run_without_the_states_of_all_learners_begins_with_the_mean(saw):
    for each in saw:
        assert torch.equal(each["resumed from the mean"], saw[0]["resumed from the mean"])
        assert not torch.equal(each["resumed from the mean"], each["resumed"])


def test_the_best_model_stays_loaded_and_is_saved_by_one_process(folder, saw):
    assert [Path(each["best checkpoint"]).name for each in saw] == ["checkpoint-8"] * 2
    best = load_file(folder / "best" / "checkpoint-8" / "model.safetensors")
    saved = load_file(folder / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], best[name]) for name in best)
    last = load_file(folder / "best" / "checkpoint-16" / "model.safetensors")
    assert any(not torch.equal(last[name], best[name]) for name in best)
    assert torch.equal(saw[0]["best"], saw[1]["best"])
    assert saw[0]["best predicted"] == saw[1]["best predicted"]
    assert [each["pushed"] for each in saw] == [[str(folder / "best")], []], "process 0 pushes"
    pushed = load_file(folder / "best" / "model.safetensors")
    assert all(torch.equal(pushed[name], best[name]) for name in best)


def test_a_subclass_trains_asynchronously_and_each_learner_logs_its_own_loss(saw):
    assert torch.equal(saw[0]["adpsgd"], saw[1]["adpsgd"])
    assert [each["adpsgd steps"] for each in saw] == [4, 4]
    assert len(saw[0]["logged"]) == len(saw[1]["logged"]) == 2
    assert saw[0]["logged"] != saw[1]["logged"]


def test_a_slow_learner_delays_no_other(saw):
    """8 batches of 2 samples with 8 tokens each; process 1 sleeps 0.05 s in every one."""
    fast, slow = (each["times"] for each in saw)
    assert len(fast) == len(slow) == 8
    assert fast[-1] < slow[-1] - 0.15
    assert [each["tokens"] for each in saw] == [8 * 2 * 8] * 2, "each learner counts its own"


def test_only_adapters_travel(folder, saw):
    whole, adapters = saw[0]["told"]
    assert whole == "learners average 3888 of 3888 parameters (0.0156 MB)"
    assert adapters == "learners average 128 of 4016 parameters (0.000512 MB)"
    for name, parameters in {
        "plain": 3888,
        "peft": 128,
    }.items():  # 16 steps; two learners send a whole gradient in each
        assert 4 * parameters <= saw[0][f"{name} bytes"] / 16 <= 4 * parameters + 100
    assert torch.equal(saw[0]["peft"], saw[1]["peft"])
    assert all(each["frozen kept"] for each in saw)
    saved = torch.load(folder / "peft" / "checkpoint-10" / "learner-0.pt", weights_only=True)
    assert sum(value.numel() for name, value in saved["module"].items() if "lora" in name) == 128
    assert not any("wte" in name for name in saved["module"])


def test_a_failure_is_told_to_the_others(saw):
    assert saw[1]["failure"] == "ZeroDivisionError: this batch is bad"
    assert saw[0]["failure"] == "PeerLostError: lost learner 1: it gave up (ZeroDivisionError: this batch is bad)"


def test_the_script_of_the_page_saves_the_mean_of_its_adapters(folder):
    saved = load_file(folder / "trained" / "adapter_model.safetensors")
    last = max((folder / "out").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    learners = [torch.load(last / f"learner-{rank}.pt", weights_only=True)["module"] for rank in range(LEARNERS)]
    for name, value in saved.items():
        trained = name.replace(".weight", ".default.weight")
        torch.testing.assert_close(value, (learners[0][trained] + learners[1][trained]) / 2, rtol=0, atol=1e-6)
