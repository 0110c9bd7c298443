"""Training runs that several claims share: learners that step together, and asynchronous learners on the virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from roundelay.clock import VirtualClock
from roundelay.simulation.learners import VirtualLearner, start
from roundelay.simulation.network import Links, ModelledNetwork
from roundelay.simulation.problems import Examples, Problem, Shards, loss
from roundelay.simulation.stacked import StackedLearners, StackedStrategy
from roundelay.strategies import ADPSGD
from roundelay.topology import Mixing

LOOK_EVERY_S = 1.0
MOMENTUM = 0.9


@dataclass
class Curve:
    """Training loss of the mean model over virtual time, and over the samples that all learners have used."""

    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def add(self, seconds: float, samples: int, loss: float) -> None:
        """Append one point."""
        self.seconds.append(seconds)
        self.samples.append(samples)
        self.losses.append(loss)


def first_below(x: Sequence[float], y: Sequence[float], target: float) -> float:
    """The x at which the line through the points first falls to `target`; infinite if it never does.

    >>> first_below([0, 1, 2], [3.0, 2.0, 0.0], 1.0)
    1.5
    """
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(x, y, strict=True)):
        if y1 <= target:
            return x1 if y0 <= target else x0 + (x1 - x0) * (y0 - target) / (y0 - y1)
    return float("inf")


def synchronous_run(
    problem: Problem,
    strategy: StackedStrategy,
    learners: int,
    *,
    batch: int,
    seed: int,
    lr: Callable[[int], float],
    momentum: float = MOMENTUM,
    adjust: Callable[[list[Tensor]], None] | None = None,
) -> Iterator[StackedLearners]:
    """Train without end, and yield the learners before the first step and after every step.

    `batch` is the number of samples per learner and step, `lr(step)` the learning rate. `adjust` may change the gradients
    between backward and step.
    """
    shards = problem.shards(learners, seed)
    stacked = StackedLearners(
        problem.module(seed),
        loss,
        lambda weights: torch.optim.SGD(weights, lr=0.0, momentum=momentum),
        strategy,
        learners,
    )
    for step in itertools.count():
        yield stacked
        stacked.optimizer.param_groups[0]["lr"] = lr(step)
        stacked.step(shards.batch(step, batch), adjust)


@dataclass(frozen=True)
class MeanModel:
    """The mean model at a virtual time, after `samples` samples of all learners, with its training loss."""

    seconds: float
    samples: int
    loss: float
    weights: dict[str, Tensor]


@dataclass
class AsynchronousRun:
    """ADPSGD on a problem, each learner at its own pace.

    Attributes:
        batch: samples per learner and step.
        lr: the learning rate, from the number of samples that all learners have used.
        compute_s: virtual seconds that a step computes, by learner.
        model_bytes: the size that a model counts as on `links`.
    """

    problem: Problem
    shards: Shards
    mixing: Mixing
    batch: int
    lr: Callable[[int], float]
    compute_s: Sequence[float]
    seed: int
    links: Links
    model_bytes: float

    def mean_models(self) -> Iterator[MeanModel]:
        """Train without end, and yield the mean model at the start and after every second of virtual time."""
        clock, self._samples = VirtualClock(), 0
        network = ModelledNetwork(clock, self.mixing.size, self.links, self.model_bytes)
        learners = [self._learner(rank, network) for rank in range(self.mixing.size)]
        start(clock, learners)
        for look in itertools.count():
            clock.run(until=look * LOOK_EVERY_S)
            weights = _mean_weights(learners)
            training_loss = mean_loss(learners[0].module, weights, self.problem.train)
            yield MeanModel(clock.now(), self._samples, training_loss, weights)

    def _learner(self, rank: int, network: ModelledNetwork) -> VirtualLearner:
        module = self.problem.module(self.seed)
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr(0), momentum=MOMENTUM, fused=True)

        def gradient(step: int) -> None:
            optimizer.zero_grad()
            loss(module, self.shards.own(rank, step, self.batch)).backward()
            self._samples += self.batch
            optimizer.param_groups[0]["lr"] = self.lr(self._samples)

        strategy, transport = ADPSGD(self.mixing), network.transports[rank]
        return VirtualLearner(module, optimizer, strategy, transport, gradient, lambda step: self.compute_s[rank])


def _mean_weights(learners: Sequence[VirtualLearner]) -> dict[str, Tensor]:
    """The mean of the live weights, by name."""
    flats = [learner.strategy.weights() for learner in learners]
    names = [name for name, _ in learners[0].module.named_parameters()]
    replicas_of = zip(*(flat.views for flat in flats if flat is not None), strict=True)
    return {name: torch.stack(replicas).mean(dim=0) for name, replicas in zip(names, replicas_of, strict=True)}


@torch.no_grad()
def mean_loss(module: nn.Module, weights: dict[str, Tensor], examples: Examples) -> float:
    """Cross-entropy of `module` with `weights` in place of its own."""
    return float(nn.functional.cross_entropy(functional_call(module, weights, (examples[0],)), examples[1]))


@torch.no_grad()
def accuracy(module: nn.Module, weights: dict[str, Tensor], examples: Examples) -> float:
    """Share of the examples that `module`, with `weights` in place of its own, classifies correctly."""
    return float((functional_call(module, weights, (examples[0],)).argmax(dim=1) == examples[1]).float().mean())
