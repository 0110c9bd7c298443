"""The start of a run: all learners have the same kind of module and strategy, and begin with equal weights."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from roundelay.cluster.environment import gather_bytes
from roundelay.errors import StrategyError
from roundelay.strategies.base import Strategy
from roundelay.transport.base import Transport
from roundelay.weights import Flat
from roundelay.weights.shards import local


def check_agreement(module: nn.Module, strategy: Strategy, transport: Transport, members: tuple[int, ...]) -> None:
    """Raise StrategyError, on all members, unless their modules and strategies match. A collective.

    Otherwise weights of different models would be mixed, or learners would wait for messages that are never sent.
    """
    if differing := _differing(_description(module), transport, members):
        raise StrategyError(
            f"the module of learner {differing} differs from learner 0's in names, shapes, dtypes or frozen parameters; "
            "build the same module everywhere"
        )
    if differing := _differing(strategy.agreement(len(members), transport.local_size), transport, members):
        raise StrategyError(
            f"the strategy of learner {differing} differs from learner 0's; "
            "build the same one everywhere, on the same topology with the same seed, in groups of the same size"
        )


def agreement_of(module: nn.Module, strategy: Strategy, size: int, local_size: int) -> str:
    """A short text that is equal on learners whose modules and strategies match; `size` learners begin the run."""
    return hashlib.sha256((_description(module) + strategy.agreement(size, local_size)).encode()).hexdigest()


def _description(module: nn.Module) -> str:
    shape = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    shape += [(name, tuple(b.shape), str(b.dtype), False) for name, b in module.named_buffers()]
    return repr(shape)


def check_shards_agree(strategy: Strategy, transport: Transport) -> None:
    """Raise StrategyError, on all processes of the world, unless all have the same strategy. A collective.

    `check_agreement` compares the processes that hold the same shard; this compares the shards.
    """
    digest = hashlib.sha256(strategy.agreement(transport.size, transport.local_size).encode()).digest()
    digests = gather_bytes(digest, len(digest))
    if differing := [str(rank) for rank, each in enumerate(digests) if each != digests[0]]:
        raise StrategyError(
            f"the strategy of processes {', '.join(differing)} differs from process 0's; build the same one everywhere"
        )


def take_first_weights(module: nn.Module, transport: Transport, members: tuple[int, ...]) -> None:
    """Give every member the parameters and buffers of learner 0. A collective."""
    tensors: list[Tensor] = [local(p) for p in module.parameters()] + list(module.buffers())
    flat = Flat(tensors, on=tensors[0].device)
    flat.read(tensors)
    transport.broadcast(flat.storage, 0, members).result()  # as bytes: no backend knows every dtype
    flat.write(tensors)


def _differing(text: str, transport: Transport, members: tuple[int, ...]) -> str:
    """The members whose text differs from learner 0's, as "1, 3"; empty if none does."""
    digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.int64)
    first = digest.clone()
    transport.broadcast(first, 0, members).result()
    differing = torch.zeros(transport.size, dtype=torch.int64)
    differing[transport.rank] = int(not torch.equal(first, digest))
    transport.all_reduce(differing, members).result()
    return ", ".join(map(str, differing.nonzero().flatten().tolist()))
