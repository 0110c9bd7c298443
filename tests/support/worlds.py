"""Small simulated runs whose results are known exactly, shared by the tests of the strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from roundelay.clock import VirtualClock
from roundelay.simulation import VirtualLearner
from roundelay.strategies import Strategy
from roundelay.transport import SimulatedNetwork

LR, MOMENTUM = 0.05, 0.9


class Quadratic(nn.Module):
    """f(x) = 1/2 (x - target)^T H (x - target) with a diagonal H: its gradient H (x - target) is known exactly."""

    def __init__(self, curvature: torch.Tensor, target: torch.Tensor) -> None:
        super().__init__()
        self.curvature, self.target = curvature, target
        size = len(curvature)
        # Two parameters, so that flat buffers have more than one view.
        self.head = nn.Parameter(torch.zeros(size // 2, dtype=curvature.dtype))
        self.tail = nn.Parameter(torch.zeros(size - size // 2, dtype=curvature.dtype))

    def forward(self) -> torch.Tensor:
        difference = torch.cat([self.head, self.tail]) - self.target
        return 0.5 * (self.curvature * difference**2).sum()

    def vector(self) -> np.ndarray:
        return torch.cat([self.head, self.tail]).detach().double().numpy().copy()


def problem(learners: int, size: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Curvatures and targets (learners, size), different for every learner."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0.5, 2.0, (learners, size)), rng.standard_normal((learners, size))


def world(
    strategies: list[Strategy],
    *,
    compute_s: Callable[[int, int], float] = lambda rank, step: 1.0,
    latency_s: float = 0.01,
    lr: float = LR,
    momentum: float = MOMENTUM,
    seed: int = 0,
) -> tuple[VirtualClock, SimulatedNetwork, list[VirtualLearner]]:
    """A clock, a network, and one learner per strategy, each on its own quadratic."""
    clock = VirtualClock()
    network = SimulatedNetwork(clock, len(strategies), latency_s=latency_s)
    curvatures, targets = problem(len(strategies), seed=seed)
    learners = []
    for rank, strategy in enumerate(strategies):
        module = Quadratic(torch.tensor(curvatures[rank]), torch.tensor(targets[rank]))
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)

        def gradient(step: int, module=module, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            module().backward()

        learners.append(
            VirtualLearner(
                module,
                optimizer,
                strategy,
                network.transports[rank],
                gradient,
                lambda step, rank=rank: compute_s(rank, step),
            )
        )
    return clock, network, learners


def train(
    clock: VirtualClock,
    network: SimulatedNetwork,
    learners: list[VirtualLearner],
    steps: Sequence[int],
    kill: Mapping[int, float] | None = None,
) -> None:
    """Run each learner for its number of steps; `kill` maps a learner to the time at which it dies."""
    for learner, count in zip(learners, steps, strict=True):
        process = learner.process(count)
        ended = clock.spawn(process, f"learner {learner.transport.rank}")
        if kill and learner.transport.rank in kill:
            at = kill[learner.transport.rank]
            clock.call_later(at, lambda ended=ended, process=process: clock.kill(ended, process))
            network.kill(learner.transport.rank, at=at)
    clock.run()


def recursion(W: Callable[[int], np.ndarray], steps: int, learners: int, seed: int = 0) -> np.ndarray:
    """X <- W_k X - alpha V,  V <- beta V + G(X): D-PSGD with momentum as one matrix recursion."""
    H, targets = problem(learners, seed=seed)
    X, V = np.zeros_like(targets), np.zeros_like(targets)
    for k in range(steps):
        V = MOMENTUM * V + H * (X - targets)
        X = W(k) @ X - LR * V
    return X


def weights(learners: list[VirtualLearner]) -> np.ndarray:
    return np.stack([learner.module.vector() for learner in learners])
