"""The consensus: the mean model of all learners, put into a module for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from roundelay.cluster.membership import Membership
from roundelay.strategies.base import Strategy
from roundelay.transport.base import Transport
from roundelay.weights import Flat, Replica
from roundelay.weights.average import with_second_moments, with_variances


@contextlib.contextmanager
def consensus_of(
    module: nn.Module, replica: Replica, strategy: Strategy, transport: Transport, membership: Membership
) -> Iterator[None]:
    """Module <- mean over learners of weights and buffers. When the block ends, the module gets its own values back."""
    members = membership.living
    _barrier(transport, members)  # from here on no learner has an exchange under way
    mean = _mean_weights(replica, strategy, transport, members)
    buffers = list(module.buffers())
    saved_weights, saved_buffers = _flat_copy(replica.tensors()), [buffer.clone() for buffer in buffers]
    try:
        mean.write(replica.tensors())
        _average_buffers(module, transport, members)
        yield
    finally:
        saved_weights.write(replica.tensors())
        for buffer, saved in zip(buffers, saved_buffers, strict=True):
            buffer.copy_(saved)


def _mean_weights(replica: Replica, strategy: Strategy, transport: Transport, members: tuple[int, ...]) -> Flat:
    """sum_i v_i x_i / sum_i v_i, where v_i is the consensus weight of learner i."""
    mean = Flat(replica.tensors(), on=replica.weights[0].device)
    own = strategy.weights()
    mean.read(replica.tensors() if own is None else own.views)
    total = torch.tensor([strategy.consensus_weight], device=mean.storage.device)
    transport.all_reduce(total, members).result()
    for part in mean.parts:
        part.mul_(strategy.consensus_weight)
        transport.all_reduce(part, members).result()
        part.div_(float(total))
    return mean


def _average_buffers(module: nn.Module, transport: Transport, members: tuple[int, ...]) -> None:
    """Floating-point buffers <- their mean, BatchNorm's variances by second moments; other buffers <- those of members[0]."""
    buffers = dict(module.named_buffers())
    floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    if floating:
        flat = _flat_copy(with_second_moments(floating).values())
        for part in flat.parts:
            transport.all_reduce(part, members).result()
            part.div_(len(members))
        means = with_variances(dict(zip(floating, flat.views, strict=True)))
        for name, mean in means.items():
            floating[name].copy_(mean)
    others = [buffer for name, buffer in buffers.items() if name not in floating]
    if others:
        flat = _flat_copy(others)
        # As bytes, because a backend need not know every dtype.
        transport.broadcast(flat.storage, members[0], members).result()
        flat.write(others)


def _flat_copy(tensors: Iterable[Tensor]) -> Flat:
    tensors = list(tensors)
    flat = Flat(tensors, on=tensors[0].device)
    flat.read(tensors)
    return flat


def _barrier(transport: Transport, members: tuple[int, ...]) -> None:
    transport.all_reduce(torch.zeros(1), members).result()
