"""What a Learner refuses or warns of: modules, optimizers and strategies that do not fit together, and lost changes."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from roundelay.errors import StrategyError
from roundelay.strategies.base import Strategy
from roundelay.weights import Replica
from roundelay.weights.shards import ShardGroup

log = logging.getLogger("roundelay")

_WRAPPERS = {"accelerate", "lightning", "pytorch_lightning", "lightning_fabric"}  # their optimizers wrap torch's
_SYNCHRONISED = (
    "synchronises gradients itself, so learners would be averaged twice. Give the Learner the module without it, and call that "
    "module in the loop; roundelay.Allreduce() does what DistributedDataParallel does"
)


def check_strategy(strategy: Strategy, module: nn.Module, shards: ShardGroup | None) -> None:
    """Raise StrategyError if this is no strategy, or it cannot average a module in shards; tell it how to count rounds.

    Warn if learners that need not wait for each other would do so in every forward pass.
    """
    if not isinstance(strategy, Strategy):
        raise StrategyError(f"a Learner needs a strategy, such as roundelay.ADPSGD(), got {strategy!r}")
    if shards is not None and strategy.reduces_gradients:
        raise StrategyError(
            f"{type(strategy).__name__} reduces gradients, which FSDP2 does itself: fully_shard on a mesh of two dimensions "
            "(HSDP) is an allreduce between nodes. Use ADPSGD, DPSGD, LocalSGD or DelayByOne, which average weights"
        )
    strategy.rounds_by_step = shards is not None
    if not strategy.synchronous and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        log.warning(
            "SyncBatchNorm makes all learners wait for each other in every forward pass, so a slow learner delays the others. "
            "Use BatchNorm: the mean model has the mean of all learners' statistics"
        )


def unwrapped_optimizer(optimizer: Any) -> Optimizer:  # noqa: ANN401
    """The torch optimizer inside a wrapper of Accelerate or Lightning; any other torch optimizer as it is.

    Raises StrategyError for anything that is no torch optimizer.
    """
    while _is_wrapper(optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise StrategyError(
            f"a Learner needs a torch.optim.Optimizer, whose steps have hooks, got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}; if it wraps a torch optimizer, give the Learner that one"
        )
    return optimizer


def _is_wrapper(optimizer: object) -> bool:
    modules = {kind.__module__.split(".")[0] for kind in type(optimizer).__mro__}
    return not modules.isdisjoint(_WRAPPERS) and isinstance(getattr(optimizer, "optimizer", None), Optimizer)


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise StrategyError unless the optimizer steps parameters of the module, with one gradient per step."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(map(id, module.parameters())):
        raise StrategyError("the optimizer has none of the module's parameters; build it from module.parameters()")
    if isinstance(optimizer, LBFGS):
        raise StrategyError(
            "LBFGS evaluates the loss several times in one step, which no averaging can follow; use another optimizer"
        )


def refuse_ddp(module: nn.Module) -> None:
    """Raise StrategyError if this is no module, or a part of it is wrapped in DistributedDataParallel, DataParallel or FSDP1."""
    if not isinstance(module, nn.Module):
        raise StrategyError(f"a Learner needs a torch.nn.Module, got {module!r}")
    for name, part in module.named_modules():
        kind = type(part).__name__
        if isinstance(part, DistributedDataParallel | DataParallel) or kind == "FullyShardedDataParallel":
            where = f"'{name}' of the module" if name else "the module"
            advice = " (for sharding use fully_shard, FSDP2)" if kind == "FullyShardedDataParallel" else ""
            raise StrategyError(f"{where} is wrapped in {kind}, which {_SYNCHRONISED}{advice}")


def refuse_ddp_around(module: nn.Module) -> None:
    """Raise StrategyError if a DistributedDataParallel in this process wraps the module or a part of it.

    A wrapper whose `forward` was replaced does nothing (see integrations/accelerate.py). A module does not know what wraps it,
    so this function looks at all objects of the process. With Lightning loaded (400,000) it takes 0.15 s: call it once.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return  # there can be no DistributedDataParallel
    weights = set(map(id, module.parameters()))
    for found in gc.get_objects():
        if not issubclass(type(found), DistributedDataParallel) or "forward" in vars(found):
            continue
        if not weights.isdisjoint(map(id, found.parameters())):
            raise StrategyError(f"the Learner's module is wrapped in {type(found).__name__}, which {_SYNCHRONISED}")


def refuse_other_parameters(optimizer: Optimizer, averaged: set[int]) -> None:
    """Raise StrategyError if the optimizer steps a parameter that learners do not average (id not in `averaged`)."""
    for group in optimizer.param_groups:
        if averaged.issuperset(map(id, group["params"])):
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and id(parameter) not in averaged:
                raise StrategyError(
                    f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that learners do not average: it is "
                    "no part of the Learner's module, or was frozen when the Learner was made. Make a new Learner with a "
                    "module that has it; a parameter that is to stay local needs an optimizer of its own"
                )


class ChangeWarning:
    """Warns, once, if the user has changed weights that the strategy is about to replace."""

    def __init__(self, strategy: Strategy, replica: Replica, rank: int) -> None:
        self._strategy, self._replica, self._rank = strategy, replica, rank
        self._warned = False

    @contextlib.contextmanager
    def before_replacing(self) -> Iterator[None]:
        """In this block the strategy may replace the weights. What the weights are at the end is no change."""
        self.warn_if_changed()
        yield
        self._replica.mark()

    def warn_if_changed(self) -> None:
        """Call this before the strategy replaces weights."""
        if self._strategy.mixes_weights and self._replica.touched() and not self._warned:
            self._warned = True
            log.warning(_CHANGED, self._rank, type(self._strategy).__name__)


_CHANGED = (
    "learner %d: the module's weights were changed, and not by a step of this optimizer. %s replaces them by the mixed "
    "weights, so the change is lost. Change weights before the Learner is made, or inside `with learner.rewrite():`. A change "
    "that belongs to every step goes into a hook of optimizer.step that is registered before the Learner is made. Weights that "
    "are put in for an evaluation, or changed anew in every forward, do no harm."
)
