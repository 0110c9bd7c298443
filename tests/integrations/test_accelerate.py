"""Accelerate's loop with our averaging: equal to its own DDP, and to the matrix recursion."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from integration_programs import torchrun, what_each_saw
from regression import LEARNERS, LR, dpsgd_by_matrix, in_turns, network, vector
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="needs the 'accelerate' extra"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    torchrun("accelerate_runs.py", folder, page="accelerate")
    return folder


@pytest.fixture(scope="module")
def saw(folder):
    return what_each_saw(folder, LEARNERS)


@pytest.mark.parametrize("wrapped", [True, False], ids=["with DDP around", "without"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_allreduce_equals_ddp(saw, accumulation, wrapped):
    for each in saw:
        ours, theirs = each[f"allreduce {accumulation} {wrapped}"], each[f"ddp {accumulation}"]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (saw[0]["ddp 1"] - saw[0]["ddp 2"]).abs().max() > 1e-3, "accumulation matters, or this would prove nothing"


def test_no_sync_is_the_learners_so_gradients_are_reduced_once_a_step(saw):
    """12 steps, or 6 with two batches each. Before the first one learners send the same few bytes."""
    for wrapped in (True, False):
        twelve, six = (saw[0][f"bytes allreduce {accumulation} {wrapped}"] for accumulation in (1, 2))
        one = (twelve - six) / 6
        assert one >= 4 * vector(network()).numel()
        assert twelve - 12 * one == six - 6 * one < one


def test_a_prepared_scheduler_steps_as_with_ddp(saw):
    """Accelerate lets a scheduler step once for each process; the rate is halved after every 4 steps."""
    for each in saw:
        assert each["allreduce 1 True rate"] == each["ddp 1 rate"] == LR / 2**6


def test_dpsgd_equals_the_matrix_recursion(saw):
    for each, expected in zip(saw, dpsgd_by_matrix(shares=in_turns), strict=True):
        torch.testing.assert_close(each["dpsgd own"], vector(expected), rtol=1e-5, atol=1e-5)
    assert (saw[0]["dpsgd own"] - saw[1]["dpsgd own"]).abs().max() > 1e-3


def test_all_learners_end_with_the_mean(saw):
    mean = (saw[0]["dpsgd own"] + saw[1]["dpsgd own"]) / 2
    for each in saw:
        torch.testing.assert_close(each["dpsgd mean"], mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(each["dpsgd"], mean, rtol=0, atol=1e-6)
    assert torch.equal(saw[0]["adpsgd"], saw[1]["adpsgd"])


def test_the_mean_model_is_saved_and_figures_are_gathered(folder, saw):
    module = network(seed=5)
    module.load_state_dict(load_file(folder / "mean" / "model.safetensors"))
    assert torch.equal(vector(module), saw[0]["dpsgd mean"])
    assert saw[0]["gathered"].tolist() == [0, 1]


def test_after_the_block_ddp_works_again(saw):
    torch.testing.assert_close(saw[0]["gradient after"], saw[1]["gradient after"], rtol=0, atol=1e-6)


def test_an_error_in_the_block_is_raised(saw):
    assert [each["raised"] for each in saw] == ["division by zero"] * 2


def test_other_engines_are_refused(saw):
    assert saw[0]["refused engine"].startswith(
        "StrategyError: Accelerate trains with DEEPSPEED, which owns the weights"
    )


def test_a_script_whose_processes_accelerate_does_not_know_is_refused(saw):
    for each in saw:  # a learner may hear it from the other one first
        assert "LaunchError: Accelerate knows of 1 of the 2 learners. Start the script with" in each["refused launcher"]


def test_the_script_of_the_page_saves_a_model(folder):
    assert load_file(folder / "trained" / "model.safetensors")["0.weight"].shape == (16, 8)
