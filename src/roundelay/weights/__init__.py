"""A learner's weights: flat buffers for exchanges, and how the module's own weights follow them."""

from torch import nn

from roundelay.weights.accelerator import AcceleratorReplica
from roundelay.weights.flat import Flat, Layout, all_finite
from roundelay.weights.replica import Replica
from roundelay.weights.shards import whole_state

__all__ = ["AcceleratorReplica", "Flat", "Layout", "Replica", "all_finite", "replica_of", "whole_state"]


def replica_of(module: nn.Module) -> Replica:
    """A `Replica` if the trainable weights are in host memory, else an `AcceleratorReplica`."""
    on_host = all(p.device.type == "cpu" for p in module.parameters() if p.requires_grad)
    return Replica(module) if on_host else AcceleratorReplica(module)
