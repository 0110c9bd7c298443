"""The consensus: the mean model of all learners, put into one module for as long as it is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from roundelay.cluster.membership import Membership
from roundelay.strategies.base import Strategy
from roundelay.transport.base import Transport
from roundelay.weights.replica import Flat, Replica


@contextlib.contextmanager
def consensus_of(
    module: nn.Module, replica: Replica, strategy: Strategy, transport: Transport, membership: Membership
) -> Iterator[None]:
    """Module <- mean over learners of weights and buffers, until the block ends, however it ends."""
    members = membership.living
    _barrier(transport, members)  # from here on nobody has an exchange under way
    mean = _mean_weights(replica, strategy, transport, members)
    buffers = list(module.buffers())
    saved_weights, saved_buffers = replica.flat(), [buffer.clone() for buffer in buffers]
    try:
        mean.write(replica.tensors())
        _average_buffers(module, transport, members)
        yield
    finally:
        replica.copy_from(saved_weights)
        for buffer, saved in zip(buffers, saved_buffers, strict=True):
            buffer.copy_(saved)


def _mean_weights(replica: Replica, strategy: Strategy, transport: Transport, members: tuple[int, ...]) -> Flat:
    """sum_i v_i x_i / sum_i v_i, where a learner that speaks for a group has v = 1 and its members 0."""
    mean = Flat(replica.tensors(), on=replica.weights[0].device)
    own = strategy.weights()
    mean.read(replica.tensors() if own is None else own.views)
    voices = torch.tensor([strategy.voice], device=mean.storage.device)
    transport.all_reduce(voices, members).result()
    for part in mean.parts:
        part.mul_(strategy.voice)
        transport.all_reduce(part, members).result()
        part.div_(float(voices))
    return mean


def _average_buffers(module: nn.Module, transport: Transport, members: tuple[int, ...]) -> None:
    norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
    with _second_moments(norms):
        for kind in ("floating", "other"):
            chosen = [b for b in module.buffers() if b.is_floating_point() == (kind == "floating")]
            if not chosen:
                continue
            flat = Flat(chosen, on=chosen[0].device)
            flat.read(chosen)
            if kind == "floating":
                for part in flat.parts:
                    transport.all_reduce(part, members).result()
                    part.div_(len(members))
            else:  # as bytes, for not every engine knows every dtype
                transport.broadcast(flat.storage, members[0], members).result()
            flat.write(chosen)


@contextlib.contextmanager
def _second_moments(norms: list[_NormBase]) -> Iterator[None]:
    """Inside, running_var holds E[x^2]: variances of learners with different means do not average, second moments do."""
    for norm in norms:
        mean, var = _statistics(norm)
        var.add_(mean**2)
    yield
    for norm in norms:
        mean, var = _statistics(norm)
        var.sub_(mean**2).clamp_(min=0)


def _statistics(norm: _NormBase) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var


def _barrier(transport: Transport, members: tuple[int, ...]) -> None:
    transport.all_reduce(torch.zeros(1), members).result()
