"""Every strategy under real torchrun with four processes, against mathematics and against torch's own DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from worlds import LR, MOMENTUM, problem, recursion, weights, world

from roundelay.simulation import run
from roundelay.strategies import DPSGD, Allreduce, DelayByOne, SuperLearner
from roundelay.topology import random_ring, ring

STEPS, LEARNERS = 50, 4
PROGRAM = Path(__file__).parent / "programs" / "oracles.py"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Final weights by name, stacked over learners."""
    folder = tmp_path_factory.mktemp("oracles")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(LEARNERS),
        str(PROGRAM),
        str(folder),
    ]
    ended = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    learners = [np.load(folder / f"{rank}.npz") for rank in range(LEARNERS)]
    return {name: np.stack([learner[name] for learner in learners]) for name in learners[0].files}


def virtual(strategy_of):
    """The same training in process, on the virtual clock."""
    clock, _, learners = world([strategy_of() for _ in range(LEARNERS)])
    run(clock, learners, STEPS)
    return weights(learners)


@pytest.mark.parametrize(
    ("name", "mixing"),
    [
        ("dpsgd ring", ring(4)),
        ("dpsgd random ring", random_ring(4)),
        ("dpsgd random ring over sockets", random_ring(4)),
    ],
)
def test_dpsgd_under_torchrun_equals_the_matrix_recursion(real, name, mixing):
    np.testing.assert_allclose(real[name], recursion(mixing.matrix, STEPS, LEARNERS), atol=1e-6)


@pytest.mark.parametrize(("name", "mixing"), [("dpsgd ring", ring), ("dpsgd random ring", random_ring)])
def test_dpsgd_under_torchrun_equals_the_virtual_world_bit_for_bit(real, name, mixing):
    assert np.array_equal(real[name], virtual(lambda: DPSGD(mixing(4))))


@pytest.mark.parametrize(
    ("name", "strategy_of"),
    [
        ("allreduce", Allreduce),
        ("delay-by-one", DelayByOne),
        ("delay-by-one gradients", lambda: DelayByOne("gradients")),
        ("super-learners", lambda: SuperLearner(DPSGD(ring(2)), 2)),
    ],
)
def test_synchronous_strategies_equal_their_virtual_selves(real, name, strategy_of):
    np.testing.assert_allclose(real[name], virtual(strategy_of), atol=1e-6)


def test_delay_by_one_equals_its_recursion(real):
    everyone = np.full((LEARNERS, LEARNERS), 1 / LEARNERS)
    np.testing.assert_allclose(real["delay-by-one"], recursion(lambda k: everyone, STEPS, LEARNERS), atol=1e-6)


def test_allreduce_equals_ddp(real):
    np.testing.assert_allclose(real["network allreduce"], real["network ddp"], atol=1e-6)


def test_allreduce_equals_gradient_descent_on_the_mean(real):
    H, targets = problem(LEARNERS)
    x, v = np.zeros(H.shape[1]), np.zeros(H.shape[1])
    for _ in range(STEPS):
        v = MOMENTUM * v + (H * (x - targets)).mean(axis=0)
        x = x - LR * v
    np.testing.assert_allclose(real["allreduce"], np.tile(x, (LEARNERS, 1)), atol=1e-6)


def test_super_learners_of_two_equal_the_recursion_on_two(real):
    H, targets = problem(LEARNERS)
    X, V = np.zeros((2, H.shape[1])), np.zeros((2, H.shape[1]))
    for _ in range(STEPS):
        gradients = (H * (np.repeat(X, 2, axis=0) - targets)).reshape(2, 2, -1).mean(axis=1)
        V = MOMENTUM * V + gradients
        X = ring(2).matrix() @ X - LR * V
    np.testing.assert_allclose(real["super-learners"], np.repeat(X, 2, axis=0), atol=1e-6)


@pytest.mark.parametrize("name", ["super-learners", "super-learners adpsgd"])
def test_members_of_a_super_learner_stay_bit_identical(real, name):
    assert np.array_equal(real[name][0], real[name][1])
    assert np.array_equal(real[name][2], real[name][3])


@pytest.mark.parametrize("name", ["dpsgd ring", "dpsgd random ring", "delay-by-one", "allreduce", "super-learners"])
def test_consensus_is_the_mean_of_all_learners(real, name):
    assert np.array_equal(real[f"{name} consensus"][0], real[f"{name} consensus"][3])
    np.testing.assert_allclose(real[f"{name} consensus"][0], real[name].mean(axis=0), atol=1e-12)


@pytest.mark.parametrize("way", ["shared", "sockets"])
def test_exchanges_conserve_the_sum_while_learners_step(real, way):
    expected = (real[f"hammer steps {way} start"] + real[f"hammer steps {way} added"]).sum(axis=0)
    end = real[f"hammer steps {way} end"].sum(axis=0)
    assert real[f"hammer steps {way} exchanges"].sum() >= 600
    assert np.abs(end - expected).max() < 1e-6 * np.abs(real[f"hammer steps {way} added"]).max()


@pytest.mark.parametrize("way", ["shared", "sockets"])
def test_without_gradients_exchanges_conserve_the_mean_and_shrink_the_spread(real, way):
    start, end = real[f"hammer still {way} start"] + real[f"hammer still {way} added"], real[f"hammer still {way} end"]
    np.testing.assert_allclose(end.mean(axis=0), start.mean(axis=0), rtol=1e-6)
    assert end.std(axis=0).max() < 1e-3 * start.std(axis=0).max()
