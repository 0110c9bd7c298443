"""The configuration of a run: frozen dataclasses whose fields state their allowed range."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from roundelay.errors import ConfigError


def at_least(least: float, default: Any) -> Any:  # noqa: ANN401  # dataclasses.field is typed so, too
    """A field whose value must be at least `least`."""
    return field(default=default, metadata={"least": least})


def fraction(default: float) -> Any:  # noqa: ANN401
    """A field whose value must be at least 0 and below 1."""
    return field(default=default, metadata={"least": 0.0, "below": 1.0})


@dataclass(frozen=True)
class TaskConfig:
    """Base class of the settings of a task, without fields. A task with settings derives a frozen dataclass from it."""


@dataclass(frozen=True)
class DataConfig:
    """How samples are divided among learners.

    Attributes:
        batch: the largest number of samples of one learner in one step.
        sharding: static: every learner has its own share; dynamic: every learner draws its next batch from a shared
            cursor, so that every sample is used exactly once an epoch, even with stragglers.
        workers: processes per learner that prepare batches; 0: the learner's own thread prepares them.
    """

    batch: int = at_least(1, 32)
    sharding: Literal["static", "dynamic"] = "static"
    workers: int = at_least(0, 0)


@dataclass(frozen=True)
class BudgetConfig:
    """How long to train.

    Attributes:
        epochs: passes over the data, counted over all learners; may be a fraction.
    """

    epochs: float = at_least(0.0, 10.0)


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of torch.

    Attributes:
        name: sgd, adam or adamw.
        lr: the learning rate before the schedule scales it.
        momentum: of sgd.
        nesterov: of sgd.
        weight_decay: of all weights, unless the task's parameter groups have their own.
        clip: the largest norm of a learner's gradient; 0: no limit.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = at_least(0.0, 0.1)
    momentum: float = fraction(0.9)
    nesterov: bool = False
    weight_decay: float = at_least(0.0, 0.0)
    clip: float = at_least(0.0, 0.0)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a function of the samples that all learners have used.

    Attributes:
        reference_batch: the batch for which `optimizer.lr` is meant. The rate of SGD grows linearly with the batch of all
            learners together, that of Adam with the root of it, and with the root of the number of learners (or
            super-learners) as well if the strategy averages weights. 0: no scaling.
        warmup_epochs: epochs in which the rate rises linearly from the unscaled to the scaled one.
        shape: constant; factor: multiplied by `factor` every epoch from epoch `decay_after_epochs` on; cosine: falls to
            zero at the end of the run.
        factor: the multiplier of shape factor; 1/sqrt(2) in the papers.
        decay_after_epochs: for shape factor: the epoch at which the rate is multiplied for the first time.
    """

    reference_batch: int = at_least(0, 0)
    warmup_epochs: float = at_least(0.0, 0.0)
    shape: Literal["constant", "factor", "cosine"] = "constant"
    factor: float = at_least(0.0, 0.5**0.5)
    decay_after_epochs: float = at_least(0.0, 10.0)


@dataclass(frozen=True)
class LocalSGDConfig:
    """Settings of the strategy local-sgd.

    Attributes:
        every: the most local steps in a round.
        outer_lr: the rate of the outer step.
        outer_momentum: the momentum of the outer step.
        overlap: go on with local steps while the messages of a round travel.
        compress: none, int8 or top-k; how weights travel. top-k needs the topology complete.
    """

    every: int = at_least(1, 50)
    outer_lr: float = at_least(0.0, 0.7)
    outer_momentum: float = fraction(0.9)
    overlap: bool = False
    compress: Literal["none", "int8", "top-k"] = "none"


@dataclass(frozen=True)
class CheckpointConfig:
    """When learners save. The mean model is evaluated at the same time.

    Attributes:
        every_epochs: epochs between two checkpoints; may be a fraction.
        keep: how many checkpoints stay, besides the best one.
    """

    every_epochs: float = at_least(0.0, 1.0)
    keep: int = at_least(1, 2)


@dataclass(frozen=True)
class MetricsConfig:
    """What a run records.

    Attributes:
        every_s: seconds between rows of one learner.
        tensorboard: write TensorBoard's event files, too. Needs the extra `tensorboard`.
        audit: record every chunk that is used, and sums of weights and updates, to see what faults have cost.
    """

    every_s: float = at_least(0.0, 1.0)
    tensorboard: bool = False
    audit: bool = False


@dataclass(frozen=True)
class Config:
    """The configuration of a run.

    Attributes:
        task: `module:Class` of the Task.
        learners: how many learners the run has.
        strategy: how learners average: a name of `roundelay.strategies.registry`, or `module:Class`.
        topology: which learners average with each other: a name of `roundelay.topology`, a graph or matrix file, or
            `module:function`. Strategies that average over all learners ignore it.
        group_size: learners per super-learner; 1: none; 0: the learners of one machine.
        max_lead: for adpsgd: after this many own steps without an exchange, a learner waits for an exchange.
        wire: for adpsgd: the type in which float32 weights travel between machines.
        min_learners: if fewer learners than this are alive, the run is saved and stopped.
        seed: of weights, shuffling, augmentation and random topologies.
        slow: `LEARNER:FACTOR` makes the steps of this learner FACTOR times longer. Separate several entries by commas.
        settings: the settings of the task.
    """

    task: str
    learners: int = at_least(1, 4)
    strategy: str = "adpsgd"
    topology: str = "random-ring"
    group_size: int = at_least(0, 1)
    max_lead: int = at_least(1, 16)
    wire: Literal["float32", "float16", "bfloat16"] = "float32"
    min_learners: int = at_least(1, 1)
    seed: int = at_least(0, 0)
    slow: str = ""
    settings: TaskConfig = TaskConfig()
    data: DataConfig = DataConfig()
    budget: BudgetConfig = BudgetConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    local_sgd: LocalSGDConfig = LocalSGDConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    def slowness(self) -> dict[int, float]:
        """The factor of every slowed learner, by its id.

        Raises ConfigError for an entry of `slow` that is not `LEARNER:FACTOR`, an unknown learner, or a factor below 1.

        >>> Config("m:T", slow="0:10,3:2").slowness()
        {0: 10.0, 3: 2.0}
        """
        factors = {}
        for entry in filter(None, self.slow.split(",")):
            learner, _, factor = entry.partition(":")
            try:
                factors[int(learner)] = float(factor)
            except ValueError:
                factors[-1] = 0.0
            if not (
                min(factors) >= 0 and max(factors) < self.learners and all(1 <= f < math.inf for f in factors.values())
            ):
                raise ConfigError(
                    f"slow needs LEARNER:FACTOR with a learner below {self.learners} and a factor of at least 1, "
                    f"such as 0:10, got '{entry}'"
                )
        return factors


def with_settings(kind: type[TaskConfig]) -> type[Config]:
    """`Config` with the settings of one task."""
    settings = ("settings", kind, field(default_factory=kind))
    return typing.cast("type[Config]", dataclasses.make_dataclass("Config", [settings], bases=(Config,), frozen=True))
