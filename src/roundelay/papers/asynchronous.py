"""Event-driven training on the virtual clock: what the claims about asynchrony share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from roundelay.clock import VirtualClock
from roundelay.simulation.learners import VirtualLearner
from roundelay.simulation.network import Links, ModelledNetwork
from roundelay.simulation.problems import Problem, Shards, loss
from roundelay.strategies import ADPSGD, Strategy
from roundelay.topology import Mixing
from roundelay.transport import SimulatedNetwork

LOOK_EVERY_S = 1.0
MOMENTUM = 0.9
PACED_STEPS, SETTLING_STEPS = 8, 4


@dataclass
class Curve:
    """What the mean model was worth, and after how much time and how many samples."""

    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def seconds_to(self, target: float) -> float:
        """When the loss was first at `target` or below, interpolated; infinite if never."""
        return first_below(self.seconds, self.losses, target)


def first_below(x: Sequence[float], y: Sequence[float], target: float) -> float:
    """Where a falling line through the points first meets `target`.

    >>> first_below([0, 1, 2], [3.0, 2.0, 0.0], 1.0)
    1.5
    """
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(x, y, strict=True)):
        if y1 <= target:
            return x1 if y0 <= target else x0 + (x1 - x0) * (y0 - target) / (y0 - y1)
    return float("inf")


@dataclass
class AsynchronousRun:
    """ADPSGD on a problem: each learner at its own pace until `until_s`, or until the mean model reaches `target`.

    Attributes:
        lr: of a learner, from the number of samples that all have seen.
        compute_s: of a step, by learner.
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

    def curve(self, until_s: float, target: float = 0.0) -> Curve:
        """Train, looking at the mean model once a second of virtual time."""
        clock, self._samples = VirtualClock(), 0
        network = ModelledNetwork(clock, self.mixing.size, self.links, self.model_bytes)
        learners = [self._learner(rank, network) for rank in range(self.mixing.size)]
        for learner in learners:
            clock.spawn(learner.process(itertools.count()), f"learner {learner.transport.rank}")
        curve = Curve()
        while clock.now() < until_s and not (curve.losses and curve.losses[-1] <= target):
            clock.run(until=clock.now() + LOOK_EVERY_S if curve.losses else 0.0)
            curve.weights = self._consensus(learners)
            curve.seconds.append(clock.now())
            curve.samples.append(self._samples)
            curve.losses.append(mean_loss(learners[0].module, curve.weights, self.problem.train))
        return curve

    def _learner(self, rank: int, network: SimulatedNetwork) -> VirtualLearner:
        module = self.problem.module(self.seed)
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr(0), momentum=MOMENTUM, fused=True)

        def gradient(step: int) -> None:
            for weight in module.parameters():
                weight.grad = None
            loss(module, self.shards.own(rank, step, self.batch)).backward()
            self._samples += self.batch
            optimizer.param_groups[0]["lr"] = self.lr(self._samples)

        pace = self.compute_s[rank]
        return VirtualLearner(
            module, optimizer, ADPSGD(self.mixing), network.transports[rank], gradient, lambda step: pace
        )

    @staticmethod
    def _consensus(learners: Sequence[VirtualLearner]) -> dict[str, Tensor]:
        """The mean of the live weights."""
        flats = [learner.strategy.weights() for learner in learners]
        names = [name for name, _ in learners[0].module.named_parameters()]
        views = zip(*(flat.views for flat in flats if flat is not None), strict=True)
        return {name: torch.stack(replicas).mean(dim=0) for name, replicas in zip(names, views, strict=True)}


@torch.no_grad()
def mean_loss(module: nn.Module, weights: dict[str, Tensor], examples: tuple[Tensor, Tensor]) -> float:
    """Loss of `module` with other weights."""
    return float(nn.functional.cross_entropy(functional_call(module, weights, (examples[0],)), examples[1]))


@torch.no_grad()
def accuracy(module: nn.Module, weights: dict[str, Tensor], examples: tuple[Tensor, Tensor]) -> float:
    """Part of the examples that `module` with other weights gets right."""
    return float((functional_call(module, weights, (examples[0],)).argmax(dim=1) == examples[1]).float().mean())


def pace(strategy_of: Callable[[], Strategy], links: Links, model_bytes: float, compute_s: Sequence[float]) -> float:
    """Virtual seconds between two steps of learners that wait for each other.

    The strategy itself on the clock, with one weight that counts as a whole model and no gradient to speak of.
    """
    clock, begun = VirtualClock(), []
    network = ModelledNetwork(clock, len(compute_s), links, model_bytes)
    for rank, own_s in enumerate(compute_s):
        module = nn.Linear(1, 1, bias=False)
        module.weight.grad = torch.zeros_like(module.weight)
        learner = VirtualLearner(
            module,
            torch.optim.SGD(module.parameters(), lr=0.0),
            strategy_of(),
            network.transports[rank],
            lambda step, rank=rank: begun.append(clock.now()) if rank == 0 else None,  # type: ignore[misc]
            lambda step, own_s=own_s: own_s,  # type: ignore[misc]
        )
        clock.spawn(learner.process(SETTLING_STEPS + PACED_STEPS + 1), f"learner {rank}")
    clock.run()
    return (begun[-1] - begun[SETTLING_STEPS]) / PACED_STEPS
