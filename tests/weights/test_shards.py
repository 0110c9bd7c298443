"""Which sharded modules learners take, and the error for each of the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from roundelay.errors import LaunchError, StrategyError
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, SuperLearner
from roundelay.weights import Replica, whole_state
from roundelay.weights.shards import ShardGroup, shard_group


@pytest.fixture(scope="module")
def mesh():
    """A mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def sharded(mesh) -> nn.Module:
    return fully_shard(network(), mesh=mesh["shard"])


def test_a_plain_module_has_no_shard_group():
    assert shard_group(network()) is None


def test_the_shard_group_of_a_sharded_module(mesh):
    assert shard_group(sharded(mesh)) == ShardGroup(ranks=(0,), index=0)


def test_hsdp_is_refused_because_gradients_would_be_averaged_twice(mesh):
    with pytest.raises(StrategyError, match=r"parameter 0\.weight .*Replicate.*HSDP.*mesh\[\"shard\"\]"):
        shard_group(fully_shard(network(), mesh=mesh))


def test_other_placements_are_refused_by_name(mesh):
    module = network()
    module[1].bias = nn.Parameter(distribute_tensor(module[1].bias.detach(), mesh["shard"], [Replicate()]))
    module[0] = fully_shard(module[0], mesh=mesh["shard"])
    module[1].weight.requires_grad_(False)
    with pytest.raises(StrategyError, match=r"parameter 1\.weight is not sharded"):
        shard_group(module)
    del module[1].weight
    with pytest.raises(StrategyError, match=r"parameter 1\.bias has the placements \(Replicate\(\),\)"):
        shard_group(module)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_tensor_parallel_parameters_are_refused_by_name(mesh, style):
    module = parallelize_module(network(), mesh["shard"], {"0": style()})
    with pytest.raises(StrategyError, match=r"parameter 0\.weight is a DTensor that fully_shard has not made"):
        shard_group(module)
    with pytest.raises(StrategyError, match=r"parameter 0\.weight"):
        Learner(module, torch.optim.SGD(module.parameters(), lr=0.1), ADPSGD())


def test_tensor_parallel_parameters_inside_a_sharded_module_are_refused_by_name():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "tensor"))
    module = parallelize_module(network(), mesh["tensor"], {"1": ColwiseParallel()})
    with pytest.raises(
        StrategyError, match=r"parameter 0\.weight is sharded over|parameter 1\.weight has the placements"
    ):
        shard_group(fully_shard(module, mesh=mesh["fsdp"]))


@pytest.mark.parametrize("strategy", [Allreduce(), SuperLearner(DPSGD(), 1)], ids=["allreduce", "super-learner"])
def test_strategies_that_reduce_gradients_are_refused(mesh, strategy):
    module = sharded(mesh)
    with pytest.raises(StrategyError, match="reduces gradients, which FSDP2 does itself"):
        Learner(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy)


def test_weights_written_after_an_evaluation_are_used_by_the_next_forward(mesh):
    module, x = sharded(mesh), torch.ones(1, 3)
    replica = Replica(module)
    zeros = replica.mirror()
    zeros.storage.zero_()
    with torch.no_grad():
        assert module(x).abs() > 0  # FSDP2 keeps the gathered weights after this
        replica.copy_from(zeros)
        assert module(x) == 0


def test_a_step_on_shards_ends_in_the_flat_buffer(mesh):
    module = sharded(mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    replica = Replica(module)
    flat, before = replica.mirror(), replica.mirror()
    module(torch.ones(1, 3)).sum().backward()
    gradients = [gradient.clone() for gradient in replica.gradients()]
    replica.begin_step(flat)
    optimizer.step()
    replica.end_step(flat)
    for after, start, gradient in zip(flat.views, before.views, gradients, strict=True):
        torch.testing.assert_close(after, start - gradient)


def test_the_whole_state_shares_no_memory_with_the_module(mesh):
    module = sharded(mesh)
    state = whole_state({"model": module.state_dict(), "steps": [3, None]})
    assert state["steps"] == [3, None]
    assert all(type(value) is torch.Tensor for value in state["model"].values())
    expected = network().state_dict()
    Replica(module).mirror().write(Replica(module).tensors())
    with torch.no_grad():
        Replica(module).tensors()[0].zero_()
    torch.testing.assert_close(dict(state["model"]), dict(expected))


def test_one_node_is_a_world_of_one(mesh):
    module = sharded(mesh)
    with Learner(module, optimizer := torch.optim.SGD(module.parameters(), lr=0.1), ADPSGD()) as learner:
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert learner.transport.size == 1
        assert set(learner.mean_state_dict()) == set(network().state_dict())


@pytest.mark.parametrize(
    ("nodes", "mine", "ranks"),
    [
        ([(0, 0, 2), (0, 1, 2), (2, 0, 2), (2, 1, 2)], (2, 3), (1, 3)),
        ([(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)], (1, 3), (2, 3)),
    ],
)
def test_the_world_of_a_shard_is_a_column_of_the_mesh(monkeypatch, mesh, nodes, mine, ranks):
    world = gathered(monkeypatch, nodes).between_nodes(mine)
    assert (world.rank, world.size, world.ranks) == (1, 2, ranks)


@pytest.mark.parametrize(
    "nodes",
    [
        [(0, 0, 1), (1, 0, 3), (1, 1, 3), (1, 2, 3)],
        [(0, 0, 2), (1, 0, 2), (1, 1, 2), (0, 1, 2)],
    ],
    ids=["unequal", "out of order"],
)
def test_processes_that_form_no_mesh_are_refused(monkeypatch, mesh, nodes):
    first = nodes[3][0]
    mine = [rank for index in range(3) for rank, node in enumerate(nodes) if node[:2] == (first, index)]
    with pytest.raises(LaunchError, match="do not form a mesh of nodes by shards"):
        gathered(monkeypatch, nodes).between_nodes(mine)


def gathered(monkeypatch, nodes):
    """The world of process 3 of four, which hears this from the others."""
    texts = [" ".join(map(str, node)).encode() for node in nodes]
    from roundelay.cluster import environment

    monkeypatch.setattr(environment, "gather_bytes", lambda mine, width: texts if width == 64 else [mine] * 4)
    return environment.World(rank=3, size=4, local_rank=3, local_size=4)
