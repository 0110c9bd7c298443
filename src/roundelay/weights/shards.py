"""Models that FSDP2 has sharded: the shards of this process, and the whole state gathered on one process.

A parameter that `fully_shard` has sharded is a DTensor: each process of a node holds some of its rows. Learners average these
local rows with the processes of other nodes that hold the same rows. A process may have no row of a small parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from roundelay.errors import StrategyError

if TYPE_CHECKING:  # imported only where a model is sharded, because the import takes a second
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ShardGroup:
    """The processes that hold one replica in shards: a node.

    Attributes:
        ranks: their ranks in torch's world, in the order of their shards.
        index: which of the shards this process holds.
    """

    ranks: tuple[int, ...]
    index: int


def shard_group(module: nn.Module) -> ShardGroup | None:
    """The processes that share this module by FSDP2; None if it is not sharded.

    Raises StrategyError, with the name of the parameter, unless all parameters are sharded over one mesh of one dimension.
    """
    sharded = next((name for name, parameter in module.named_parameters() if is_sharded(parameter)), None)
    if sharded is None:
        return None
    if not reshard(module):
        raise StrategyError(
            f"parameter {sharded} is a DTensor that fully_shard has not made; tensor-parallel parameters cannot be averaged. "
            "Learners take modules sharded by fully_shard over one dimension of a mesh"
        )
    mesh = None
    for name, parameter in module.named_parameters():
        if not is_sharded(parameter):
            raise StrategyError(
                f"parameter {name} is not sharded, but others are; call fully_shard on the whole module as well, so that "
                "the processes of a node keep one value of it"
            )
        _check_placements(name, parameter)
        mesh = mesh or parameter.device_mesh
        if parameter.device_mesh != mesh:
            raise StrategyError(
                f"parameter {name} is sharded over {parameter.device_mesh}, others over {mesh}; use one mesh for all"
            )
    assert mesh is not None
    return ShardGroup(tuple(mesh.mesh.tolist()), mesh.get_local_rank())


def _check_placements(name: str, parameter: DTensor) -> None:
    """Raise StrategyError unless the parameter has one placement, and that is a shard."""
    placements = parameter.placements
    if len(placements) == 1 and placements[0].is_shard():
        return
    if len(placements) == 2 and placements[0].is_replicate() and placements[1].is_shard():
        raise StrategyError(
            f"parameter {name} has the placements {placements}: fully_shard on a mesh of two dimensions (HSDP) averages "
            'gradients along the first one itself. Shard over the second one only, fully_shard(module, mesh=mesh["shard"]), '
            "and learners average along the first"
        )
    raise StrategyError(
        f"parameter {name} has the placements {placements}; learners can average parameters that fully_shard has sharded "
        "over one dimension, but no tensor-parallel or replicated ones"
    )


def is_sharded(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor. Imports nothing."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this process holds, detached, in the same memory; all of them if it is not sharded."""
    with torch.no_grad():
        return tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()


def reshard(module: nn.Module) -> bool:
    """Drop gathered weights. FSDP2 keeps those of the outermost module after a forward without a backward.

    Until they are dropped, the module would use them and not what is written to the shards. Returns False if no part of
    the module is FSDP2's.
    """
    from torch.distributed.fsdp import FSDPModule

    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.reshard()
    return bool(parts)


def whole_state(state: Any) -> Any:  # noqa: ANN401
    """A copy of the state in host memory, with sharded tensors made whole. On all but the first process these are None.

    For a checkpoint without shards. All processes of the node must call this with the same state: `state_dict`s, or
    any dictionaries and lists of tensors and plain values. Sharded tensors are gathered one at a time, so only the
    first process holds more than one whole tensor.
    """
    if isinstance(state, dict):
        return {key: whole_state(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole_state(value) for value in state)
    if not isinstance(state, Tensor):
        return state
    if not is_sharded(state):
        return state.detach().to("cpu", copy=True)
    with torch.no_grad():
        whole = state.full_tensor()
    return whole.to("cpu", copy=True) if state.device_mesh.get_local_rank() == 0 else None
