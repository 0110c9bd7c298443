"""From names in a configuration to objects: the strategy and the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from roundelay.cluster.environment import World
from roundelay.errors import TopologyError
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, Strategy, SuperLearner
from roundelay.topology import Mixing
from roundelay.topology.registry import named
from roundelay.training.config import Config, OptimizerConfig
from roundelay.training.schedule import Schedule

OTHER_TOPOLOGY = "random-ring"  # fits any number of learners

log = logging.getLogger("roundelay")


def strategy_of(config: Config, world: World) -> Strategy:
    """The strategy that the configuration names, for the learners that are there."""
    members = config.group_size or world.local_size
    between = _between(config, world.size // members)
    return SuperLearner(between, members) if members > 1 else between


def mixing_of(config: Config, groups: int) -> Mixing:
    """The configured topology over so many; where it does not exist for that number, another that does."""
    try:
        return named(config.topology, groups, config.seed)
    except TopologyError as error:
        if groups == config.learners:
            raise
        log.warning("%s; going on with %s", error, OTHER_TOPOLOGY)
        return named(OTHER_TOPOLOGY, groups, config.seed)


def _between(config: Config, groups: int) -> Strategy:
    if config.strategy == "adpsgd":
        return ADPSGD(mixing_of(config, groups), config.max_lead, full_precision=config.full_precision)
    if config.strategy == "dpsgd":
        return DPSGD(mixing_of(config, groups))
    if config.strategy == "allreduce":
        return Allreduce()
    return DelayByOne("gradients" if config.strategy == "delay-by-one-gradients" else "weights")


def schedule_of(config: Config, samples_per_epoch: int, samples: int) -> Schedule:
    """The learning rate of a run with `samples` samples over all epochs."""
    batch = config.data.batch * config.learners
    return Schedule(config.optimizer, config.schedule, batch=batch, epoch=samples_per_epoch, total=samples)


def learner_seed(config: Config, learner: int) -> int:
    """The seed of torch's default generator in one learner, such as for dropout. It differs between learners."""
    return config.seed * 1_000_003 + learner


def optimizer_of(config: OptimizerConfig, parameters: Iterable[Any]) -> Optimizer:
    """One of torch's."""
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
