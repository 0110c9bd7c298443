"""FSDP2 inside a node and averaging between nodes, with 2 x 2 processes: equal to two learners without shards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sharded import HALF, LOCAL_STEPS, NODES, OPTIMIZERS, SHARDS, STEPS, batch, loss, model
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from roundelay.bench.local import local_environment
from roundelay.clock import VirtualClock
from roundelay.cluster.environment import host_store
from roundelay.simulation import VirtualLearner
from roundelay.strategies import ADPSGD
from roundelay.strategies.registry import strategy_named
from roundelay.transport import SimulatedNetwork
from roundelay.weights.average import mean_module

PROGRAM = Path(__file__).parent / "programs" / "shards.py"
RUNS = pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [(s, o) for s in ("dpsgd", "delay-by-one", "delay-by-one-gradients", "local-sgd") for o in OPTIMIZERS],
)

pytestmark = pytest.mark.timeout(400)


def unsharded(strategy, optimizer, *, steps, checkpoints=None):
    """Train two learners without shards on the virtual clock; the checkpoint of each after `steps` steps in all."""
    clock = VirtualClock()
    network = SimulatedNetwork(clock, NODES)
    modules, states = [], []
    for node in range(NODES):
        module = model()
        own_optimizer = OPTIMIZERS[optimizer](module.parameters())
        own_strategy = strategy_named(strategy, every=LOCAL_STEPS)
        first = 0
        if checkpoints:
            first = checkpoints[node]["learner"]["steps"]
            set_model_state_dict(module, checkpoints[node]["model"])
            set_optimizer_state_dict(module, own_optimizer, checkpoints[node]["optimizer"])

        def gradient(step, node=node, module=module, optimizer=own_optimizer, first=first):
            optimizer.zero_grad()
            loss(module, batch(node, first + step)).backward()

        learner = VirtualLearner(
            module, own_optimizer, own_strategy, network.transports[node], gradient, lambda step: 1.0
        )
        clock.spawn(learner.process(steps - first), f"learner {node}")
        if checkpoints:
            clock.call_later(
                0.5, lambda s=own_strategy, node=node: s.load_state_dict(checkpoints[node]["learner"]["strategy"])
            )
        modules.append((module, own_optimizer, own_strategy))
    clock.run()
    for module, own_optimizer, own_strategy in modules:
        states.append(
            {
                "model": get_model_state_dict(module),
                "optimizer": get_optimizer_state_dict(module, own_optimizer),
                "learner": {"steps": steps, "strategy": own_strategy.state_dict()},
            }
        )
    return states


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the program has put its results."""
    folder = tmp_path_factory.mktemp("shards")
    for node, state in enumerate(unsharded("dpsgd", "adamw", steps=HALF)):
        torch.save(state, folder / f"unsharded {node}.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NODES * SHARDS)]
    ended = subprocess.run(
        [*command, str(PROGRAM), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


def loaded(folder, name):
    """The results of this name, one for each node."""
    return [torch.load(folder / f"{name} {node}.pt", weights_only=True) for node in range(NODES)]


def assert_close(states, expected):
    for state, other in zip(states, expected, strict=True):
        torch.testing.assert_close(dict(state), dict(other), atol=1e-6, rtol=0)


@RUNS
def test_shards_equal_the_run_without_them(folder, strategy, optimizer):
    expected = [state["model"] for state in unsharded(strategy, optimizer, steps=STEPS)]
    assert (expected[0]["first.weight"] - expected[1]["first.weight"]).abs().max() > 1e-4 or "gradients" in strategy
    assert_close(loaded(folder, f"{strategy} {optimizer}"), expected)


@RUNS
def test_the_mean_model_is_whole(folder, strategy, optimizer):
    checkpoints = loaded(folder, f"checkpoint {strategy} {optimizer}")
    mean = mean_module([each["model"] for each in checkpoints])
    first, second = loaded(folder, f"mean {strategy} {optimizer}")
    assert_close([first["whole"]], [mean])
    module = model()
    module.load_state_dict(mean)
    assert second["loss"] == pytest.approx(loss(module, batch(0, 0)).item(), abs=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_with_shards_resumes_without_them(folder, optimizer):
    resumed = unsharded("dpsgd", optimizer, steps=STEPS, checkpoints=loaded(folder, f"checkpoint dpsgd {optimizer}"))
    assert_close([state["model"] for state in resumed], loaded(folder, f"dpsgd {optimizer}"))


def test_a_checkpoint_without_shards_resumes_with_them(folder):
    expected = [state["model"] for state in unsharded("dpsgd", "adamw", steps=STEPS)]
    assert_close(loaded(folder, "resumed"), expected)


@pytest.mark.parametrize("strategy", ["dpsgd", "delay-by-one"])
def test_shards_on_an_accelerator_equal_shards_in_host_memory(folder, strategy):
    assert_close(loaded(folder, f"accelerated {strategy} adamw"), loaded(folder, f"{strategy} adamw"))


@pytest.mark.parametrize("where", ["", "accelerated "], ids=["host", "accelerator"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_exchanges_conserve_the_sum_over_nodes_of_each_shard(folder, shard, where):
    ends = [torch.load(folder / f"{where}adpsgd {node} {shard}.pt", weights_only=True) for node in range(NODES)]
    torch.testing.assert_close(
        sum(each["end"] for each in ends), sum(each["start"] + each["added"] for each in ends), atol=1e-12, rtol=0
    )
    assert all(each["figures"]["exchanges_finished"] > 10 for each in ends)
    assert (ends[0]["end"] - ends[1]["end"]).abs().max() < 0.5 * (ends[0]["added"] - ends[1]["added"]).abs().max()


@pytest.mark.parametrize("node", range(NODES))
def test_exchanges_of_two_shards_of_a_node_are_at_most_max_lead_steps_apart(folder, node):
    leads = [torch.load(folder / f"adpsgd {node} {shard}.pt", weights_only=True)["leads"] for shard in range(SHARDS)]
    assert max(abs(first - second) for first, second in zip(*leads, strict=True)) <= ADPSGD().max_lead


@pytest.mark.parametrize(
    ("dying", "first_dead"),
    [(0, 0), pytest.param(1, 1, marks=pytest.mark.slow)],
    ids=["all processes of a node", "one process of a node"],
)
def test_a_node_that_dies_is_left_out_and_the_other_goes_on(dying, first_dead):
    store, (host, port) = host_store("127.0.0.1")  # outside of the processes, because the first of them may die
    program = PROGRAM.with_name("dying_node.py")
    processes = []
    try:
        for environment in local_environment(NODES * SHARDS):
            meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            command = [sys.executable, str(program), str(dying), str(first_dead)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env=environment | meeting, **pipes))
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        del store
    for rank, (process, (out, err)) in enumerate(zip(processes, ended, strict=True)):
        node, shard = divmod(rank, SHARDS)
        if node == dying:
            assert process.returncode == (-signal.SIGKILL if shard >= first_dead else 1)
        else:
            assert process.returncode == 0, err[-4000:]
            assert f"learner {node} has lost learner {dying}: " in err
            assert out == f"finished 120 {5 if shard == 0 else 0}\n"
