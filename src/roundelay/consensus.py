"""The consensus: the mean model of all learners, put into a module for the length of a block or for good."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundelay.strategies.base import Strategy
from roundelay.transport.base import Transport
from roundelay.weights import Flat, Replica
from roundelay.weights.average import with_second_moments, with_variances


@dataclass(frozen=True)
class Mean:
    """The mean model: weights, and buffers by name."""

    weights: Flat
    buffers: dict[str, Tensor]

    @contextlib.contextmanager
    def placed(self, module: nn.Module, replica: Replica) -> Iterator[None]:
        """In this block the module has the mean model. Afterwards it gets its own values back."""
        buffers = dict(module.named_buffers())
        saved_weights = _flat_copy(replica.tensors())
        saved_buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        try:
            self.write(module, replica)
            yield
        finally:
            saved_weights.write(replica.tensors())
            for name, buffer in buffers.items():
                buffer.copy_(saved_buffers[name])

    def write(self, module: nn.Module, replica: Replica) -> None:
        """Put the mean model into the module for good."""
        self.weights.write(replica.tensors())
        for name, buffer in module.named_buffers():
            buffer.copy_(self.buffers[name])


def mean_of(
    module: nn.Module, replica: Replica, strategy: Strategy, transport: Transport, members: tuple[int, ...]
) -> Mean:
    """The mean over `members` of weights and buffers. A collective: all members must call it."""
    _barrier(transport, members)  # from here on no learner has an exchange under way
    return Mean(_mean_weights(replica, strategy, transport, members), _mean_buffers(module, transport, members))


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


def _mean_buffers(module: nn.Module, transport: Transport, members: tuple[int, ...]) -> dict[str, Tensor]:
    """The mean of floating-point buffers (of BatchNorm's variances by second moments); others come from members[0]."""
    buffers = dict(module.named_buffers())
    floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    means: dict[str, Tensor] = {}
    if floating:
        flat = _flat_copy(with_second_moments(floating).values())
        for part in flat.parts:
            transport.all_reduce(part, members).result()
            part.div_(len(members))
        means |= with_variances(dict(zip(floating, flat.views, strict=True)))
    others = {name: buffer for name, buffer in buffers.items() if name not in floating}
    if others:
        flat = _flat_copy(others.values())
        # As bytes, because a backend need not know every dtype.
        transport.broadcast(flat.storage, members[0], members).result()
        means |= dict(zip(others, flat.views, strict=True))
    return means


def _flat_copy(tensors: Iterable[Tensor]) -> Flat:
    tensors = list(tensors)
    flat = Flat(tensors, on=tensors[0].device)
    flat.read(tensors)
    return flat


def _barrier(transport: Transport, members: tuple[int, ...]) -> None:
    transport.all_reduce(torch.zeros(1), members).result()
