"""From a configuration to objects: strategy, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from roundelay.strategies import Strategy, SuperLearner
from roundelay.strategies.registry import strategy_named
from roundelay.topology import family
from roundelay.training.config import Config, OptimizerConfig
from roundelay.training.schedule import Schedule


def strategy_of(config: Config, local_size: int | None = None) -> Strategy:
    """A new strategy, as the configuration names it, not yet attached to a learner.

    Its properties, such as `uses_collectives`, can be read already.

    Args:
        config: of the run.
        local_size: number of learners on this machine. It is the size of a group if `group_size` is 0. By default all
            learners of the run.

    Raises StrategyError or TopologyError for an unknown strategy or topology.
    """
    local = config.local_sgd
    between = strategy_named(
        config.strategy,
        topology=family(config.topology, seed=config.seed),
        max_lead=config.max_lead,
        wire=None if config.wire == "float32" else config.wire,
        every=local.every,
        outer_lr=local.outer_lr,
        outer_momentum=local.outer_momentum,
        overlap=local.overlap,
        compress=None if local.compress == "none" else local.compress,
    )
    members = config.group_size or local_size or config.learners
    return SuperLearner(between, members) if members > 1 else between


def gradients_of(config: Config, strategy: Strategy) -> int:
    """How many different gradients optimizers see in a step: 1 if all are averaged, else one per learner or super-learner."""
    return 1 if strategy.needs_equal_weights else config.learners // strategy.members_of_a_group(config.learners)


def schedule_of(config: Config, samples_per_epoch: int, samples: int, strategy: Strategy) -> Schedule:
    """The learning rate of a run with `samples` samples over all epochs; `strategy` comes from `strategy_of`."""
    batch, gradients = config.data.batch * config.learners, gradients_of(config, strategy)
    sizes = {"batch": batch, "gradients": gradients, "epoch": samples_per_epoch, "total": samples}
    return Schedule(config.optimizer, config.schedule, **sizes)


def learner_seed(config: Config, learner: int) -> int:
    """The seed of torch's default generator in one learner, such as for dropout. It differs between learners."""
    return config.seed * 1_000_003 + learner


def optimizer_of(config: OptimizerConfig, parameters: Iterable[Any]) -> Optimizer:
    """The optimizer of torch that the configuration names, for these parameters or groups of parameters."""
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=config.lr, weight_decay=config.weight_decay)
