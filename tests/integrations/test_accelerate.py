"""Accelerate's loop with our averaging: equal to its own DDP, and to the matrix recursion."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from regression import LEARNERS, dpsgd_by_matrix, in_turns, network, vector
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="needs the 'accelerate' extra"),
]
PROGRAM = Path(__file__).parent / "programs" / "accelerate_runs.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(LEARNERS), str(PROGRAM), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def saw(folder):
    return [torch.load(folder / f"saw {rank}.pt", weights_only=True) for rank in range(LEARNERS)]


@pytest.mark.parametrize("wrapped", [True, False], ids=["with DDP around", "without"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_allreduce_equals_ddp(saw, accumulation, wrapped):
    for each in saw:
        ours, theirs = each[f"allreduce {accumulation} {wrapped}"], each[f"ddp {accumulation}"]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (saw[0]["ddp 1"] - saw[0]["ddp 2"]).abs().max() > 1e-3, "accumulation matters, or this would prove nothing"


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
    assert saw[0]["refused"].startswith("Accelerate trains with DEEPSPEED, which owns the weights")
