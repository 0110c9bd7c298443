"""The consensus: the mean model of all learners, put into a module for the length of a block or for good."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundelay import waiting
from roundelay.strategies.base import Strategy
from roundelay.strategy_runner import StrategyRunner
from roundelay.transport.base import Transport
from roundelay.weights import Flat, Replica, whole_state
from roundelay.weights.average import with_second_moments, with_variances
from roundelay.weights.shards import ShardGroup


@dataclass(frozen=True)
class Mean:
    """The mean model: weights, and buffers by name."""

    weights: Flat
    buffers: dict[str, Tensor]


class Consensus:
    """Computes the mean model, and puts it into the module. All learners must call each method equally often.

    Args:
        module: what is trained.
        runner: runs the hooks of the strategy, and collectives.
        shards: the processes that hold the module in shards, if FSDP2 has sharded it.
    """

    def __init__(self, module: nn.Module, runner: StrategyRunner, shards: ShardGroup | None) -> None:
        self._module, self._runner, self._shards = module, runner, shards

    @contextlib.contextmanager
    def placed(self, timeout_s: float | None = None) -> Iterator[nn.Module]:
        """In this block the module has the mean model. Afterwards it gets its own values back."""
        mean, replica = self._mean(timeout_s), self._runner.replica
        buffers = dict(self._module.named_buffers())
        saved_weights = _flat_copy(replica.tensors())
        saved_buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        try:
            self._write(mean)
            yield self._module
        finally:
            saved_weights.write(replica.tensors())
            for name, buffer in buffers.items():
                buffer.copy_(saved_buffers[name])
            replica.mark()

    def settle(self, timeout_s: float | None) -> None:
        """Put the mean model into the module for good."""
        mean, strategy = self._mean(timeout_s), self._runner.strategy
        state = strategy.state_dict()
        self._write(mean)
        strategy.load_state_dict(state)
        # No exchange may begin before all learners have the mean.
        self._runner.together(lambda members: _barrier(self._runner.peers.transport, members))
        self._runner.replica.mark()

    def state_dict(self) -> dict[str, Tensor]:
        """The whole mean model, on the first living learner (with shards: on its first process); empty on all others."""
        # Read before the consensus: peers may leave as soon as it ends, and shards of a node need the same `first`.
        first = self._runner.peers.membership.living[0]
        with self.placed() as mean_model:
            if self._runner.peers.transport.rank != first:
                return {}
            whole: dict[str, Tensor] = whole_state(mean_model.state_dict())
        return whole if self._shards is None or self._shards.index == 0 else {}

    def _mean(self, timeout_s: float | None) -> Mean:
        self._runner.warning.warn_if_changed()
        self._runner.drain()
        return self._runner.together(self._mean_over, timeout_s)

    def _mean_over(self, members: tuple[int, ...]) -> Mean:
        """The mean over `members` of weights and buffers. A collective: all members must call it."""
        replica, strategy, transport = self._runner.replica, self._runner.strategy, self._runner.peers.transport
        _barrier(transport, members)  # from here on no learner has an exchange under way
        weights = _mean_weights(replica, strategy, transport, members)
        return Mean(weights, _mean_buffers(self._module, transport, members))

    def _write(self, mean: Mean) -> None:
        replica = self._runner.replica
        replica.wait_until_readable()  # the copy of the last step to host memory may still read the weights
        mean.weights.write(replica.tensors())
        for name, buffer in self._module.named_buffers():
            buffer.copy_(mean.buffers[name])


def _mean_weights(replica: Replica, strategy: Strategy, transport: Transport, members: tuple[int, ...]) -> Flat:
    """sum_i v_i x_i / sum_i v_i, where v_i is the consensus weight of learner i."""
    mean = Flat(replica.tensors(), on=replica.weights[0].device)
    own = strategy.weights()
    mean.read(replica.tensors() if own is None else own.views)
    total = torch.tensor([strategy.consensus_weight], device=mean.storage.device)
    waiting.result(transport.all_reduce(total, members))
    for part in mean.parts:
        part.mul_(strategy.consensus_weight)
        waiting.result(transport.all_reduce(part, members))
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
            waiting.result(transport.all_reduce(part, members))
            part.div_(len(members))
        means |= with_variances(dict(zip(floating, flat.views, strict=True)))
    others = {name: buffer for name, buffer in buffers.items() if name not in floating}
    if others:
        flat = _flat_copy(others.values())
        # As bytes, because a backend need not know every dtype.
        waiting.result(transport.broadcast(flat.storage, members[0], members))
        means |= dict(zip(others, flat.views, strict=True))
    return means


def _flat_copy(tensors: Iterable[Tensor]) -> Flat:
    tensors = list(tensors)
    flat = Flat(tensors, on=tensors[0].device)
    flat.read(tensors)
    return flat


def _barrier(transport: Transport, members: tuple[int, ...]) -> None:
    waiting.result(transport.all_reduce(torch.zeros(1), members))
