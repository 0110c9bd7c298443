r"""Theory beside experiment on a real loss: logistic regression on digits, around its minimum.

There the gradient at learner i is $H (x_i - x^*)$ plus noise of a covariance C that the data give. In an eigenvector of H with
curvature h and noise c the distance from consensus is an AR(1) process of every mode of the mixing, so that

$$E\,\tfrac1n \sum_i |x_i - \bar x|^2 = \alpha^2 \sum_j c_j\, v(\alpha h_j), \qquad
  v(a) = \frac1n \sum_{k \ge 2} \frac{1}{1 - (\lambda_k - a)^2},$$

and with a ring drawn anew each round, whose rounds have $E\,\lambda^2 = \rho$ and $E\,\lambda = \mu$,
$v(a) = \frac{n-1}{n} / (1 - \rho + 2 a \mu - a^2)$. Without curvature both are the mixing's `stationary_variance`.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from roundelay.clock import VirtualClock
from roundelay.simulation.learners import VirtualLearner
from roundelay.simulation.network import Links, ModelledNetwork
from roundelay.simulation.problems import Examples, digits
from roundelay.simulation.stacked import StackedLearners
from roundelay.strategies import ADPSGD, DPSGD
from roundelay.topology import Mixing
from roundelay.topology.mixing import Array, RelabelledMixing
from roundelay.topology.spectrum import relabelled_contraction

LR, BATCH, DECAY = 0.05, 8, 0.01  # weight decay, without which separable data have no minimum
NEWTON_STEPS = 8
EXCHANGE_S = 1e-3  # of a step


@dataclass(frozen=True)
class Minimum:
    """The minimiser and, along each eigenvector of the Hessian, the curvature and the variance of a batch's gradient."""

    weights: Tensor
    curvatures: Array
    noise: Array


@functools.cache
def examples() -> Examples:
    """Pixels and a constant, in double precision, and labels."""
    x, y = digits().train
    return torch.cat([x, torch.ones(len(x), 1)], dim=1).double(), y


def _module(weights: Tensor) -> nn.Linear:
    module = nn.Linear(weights.shape[1], weights.shape[0], bias=False).double()
    with torch.no_grad():
        module.weight.copy_(weights)
    return module


def loss(module: nn.Module, batch: Examples) -> Tensor:
    """Mean cross-entropy and weight decay."""
    (weights,) = module.parameters()
    return nn.functional.cross_entropy(module(batch[0]), batch[1]) + DECAY / 2 * weights.square().sum()


@functools.cache
def minimum() -> Minimum:
    """By Newton's method; H and C exactly, from all samples."""
    x, y = examples()
    labels = nn.functional.one_hot(y).double()
    weights = torch.zeros(labels.shape[1], x.shape[1], dtype=torch.float64)
    for _ in range(NEWTON_STEPS):
        gradient = (torch.softmax(x @ weights.T, dim=1) - labels).T @ x / len(x) + DECAY * weights
        weights = weights - torch.linalg.solve(_hessian(weights, x), gradient.flatten()).view_as(weights)
    errors = torch.softmax(x @ weights.T, dim=1) - labels
    gradients = torch.einsum("nc,nf->ncf", errors, x).flatten(1)  # of every sample
    curvatures, U = torch.linalg.eigh(_hessian(weights, x))
    noise = (gradients @ U).var(dim=0, correction=0) / BATCH
    return Minimum(weights, curvatures.numpy(), noise.numpy())


def _hessian(weights: Tensor, x: Tensor) -> Tensor:
    r"""$\frac1N \sum_n (\mathrm{diag}(p_n) - p_n p_n^T) \otimes x_n x_n^T$ and the decay."""
    p = torch.softmax(x @ weights.T, dim=1)
    S = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    H = torch.einsum("nab,ni,nj->aibj", S, x, x).reshape(weights.numel(), -1) / len(x)
    return H + DECAY * torch.eye(len(H), dtype=H.dtype)


def predicted(mixing: Mixing) -> float:
    """Mean squared distance from consensus, in units of alpha^2 times the noise of a gradient."""
    at = minimum()
    a, n = LR * at.curvatures[:, None], mixing.size
    if isinstance(mixing, RelabelledMixing):
        W = mixing.matrix()  # of any round: relabelling changes neither trace nor norm
        contraction, mean = relabelled_contraction(mixing), (np.trace(W) - 1) / (n - 1)
        v = (n - 1) / n / (1 - contraction + 2 * a[:, 0] * mean - a[:, 0] ** 2)
    else:
        others = np.linalg.eigvalsh(mixing.matrix())[:-1]
        v = (1 / (1 - (others - a) ** 2)).sum(axis=1) / n
    return float(at.noise @ v / at.noise.sum())


def _drawn(generator: torch.Generator, *size: int) -> Examples:
    """Batches from all samples, with replacement."""
    x, y = examples()
    chosen = torch.randint(len(y), size, generator=generator)
    return x[chosen], y[chosen]


def _scaled(squares: list[float]) -> float:
    return float(np.mean(squares) / (LR**2 * minimum().noise.sum()))


def dpsgd_spread(mixing: Mixing, rounds: int, seed: int) -> float:
    """Measured, in the same units: DPSGD from the minimum on, over the second half of the rounds."""
    learners = StackedLearners(
        _module(minimum().weights), loss, lambda w: torch.optim.SGD(w, lr=LR), DPSGD(mixing), mixing.size
    )
    generator, squares = torch.Generator().manual_seed(seed), []
    for round in range(rounds):
        learners.step(_drawn(generator, mixing.size, BATCH))
        if round >= rounds // 2:
            squares.append(learners.spread() ** 2)
    return _scaled(squares)


def adpsgd_spread(mixing: Mixing, steps: int, seed: int) -> float:
    """Measured, in the same units: ADPSGD itself on the clock, with an exchange that takes next to no time."""
    clock, size = VirtualClock(), mixing.size
    network = ModelledNetwork(clock, size, Links(latency_s=EXCHANGE_S / 2))
    generator, paces = torch.Generator().manual_seed(seed), np.random.default_rng(seed).uniform(0.9, 1.1, size)
    strategies = [ADPSGD(mixing) for _ in range(size)]
    for rank, strategy in enumerate(strategies):
        module = _module(minimum().weights)

        def gradient(step: int, module: nn.Linear = module) -> None:
            module.zero_grad()
            loss(module, _drawn(generator, BATCH)).backward()

        learner = VirtualLearner(
            module,
            torch.optim.SGD(module.parameters(), lr=LR),
            strategy,
            network.transports[rank],
            gradient,
            lambda step, pace=float(paces[rank]): pace,  # type: ignore[misc]
        )
        clock.spawn(learner.process(itertools.count()), f"learner {rank}")
    squares = []
    for second in range(steps):
        clock.run(until=second + 0.5)
        if second >= steps // 2:
            X = torch.stack([strategy.weights().parts[0] for strategy in strategies])
            squares.append(float((X - X.mean(dim=0)).square().sum(dim=1).mean()))
    return _scaled(squares)
