"""The strategies that a plan knows: what a step of each costs, and how far apart its replicas are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roundelay.planning import cost
from roundelay.planning.cluster import Cluster
from roundelay.planning.cost import CostModel, StepCost
from roundelay.topology.cayley import CayleyMixing
from roundelay.topology.mixing import SAMPLED_ROUNDS, Array, Mixing, RelabelledMixing
from roundelay.topology.spectrum import stationary_variance

PAIR_WEIGHT = 1 / 3  # as in strategies/pair_exchange.py, which imports torch; a test compares the two


@dataclass(frozen=True)
class Model:
    """What a plan must know about a strategy.

    Attributes:
        cost: predicts the time of a step.
        variance: (mixing, exchanges per step) -> stationary variance of the replicas in units of (alpha sigma)^2; None if
            it has no bound.
        synchronous: learners wait for each other.
        has_topology: it averages along a topology. A strategy without one averages all learners, so its mixing is `complete`.
        takes_groups: it can run between super-learners.
        local_steps: steps between two averagings; 1 for all strategies but local-sgd.
        averages_gradients: the optimizer sees the mean gradient of all learners.
    """

    cost: CostModel
    variance: Callable[[Mixing, float], float | None]
    synchronous: bool = True
    has_topology: bool = False
    takes_groups: bool = True
    local_steps: int = 1
    averages_gradients: bool = False


def step_cost(model: Model, mixing: Mixing, cluster: Cluster, group_size: int = 1, seed: int = 0) -> StepCost:
    """The cost of a step on a cluster; a `group_size` above 1, which must be the cluster's own, means super-learners.

    The mixing is between learners, or between super-learners if there are any.
    """
    times = cluster.compute_times(seed)
    if group_size > 1:
        return cost.super_learner(model.cost, cluster, times, mixing)
    return model.cost(cluster, times, mixing)


def _of_equal_replicas(mixing: Mixing, exchanges_per_step: float) -> float:
    return 0.0


def _of_mixing(mixing: Mixing, exchanges_per_step: float) -> float | None:
    return stationary_variance(mixing)


def _of_rounds(mixing: Mixing, exchanges_per_step: float) -> float | None:
    """Variance if learners average once in H steps: H times that of averaging in every step, before they average."""
    variance, n = stationary_variance(mixing), mixing.size
    if variance is None or n == 1:
        return variance
    local_steps = round(1 / exchanges_per_step)
    return local_steps * variance - (local_steps - 1) / 2 * (n - 1) / n  # the mean over a round


def _of_pairs(mixing: Mixing, exchanges_per_step: float) -> float | None:
    r"""Variance if n e pairs, drawn from the edges E, average between two steps.

    A pair that moves by w has $E[W^T W] = I - 2w(1-w) L / |E|$, with the Laplacian L.
    """
    n = mixing.size
    if n == 1:
        return 0.0
    contraction = 4 * PAIR_WEIGHT * (1 - PAIR_WEIGHT)  # the degrees below sum to 2 |E|
    if isinstance(mixing, RelabelledMixing):
        factors = np.full(n - 1, 1 - contraction / (n - 1))
    else:
        degrees, eigenvalues = _laplacian_spectrum(mixing)
        factors = 1 - contraction * eigenvalues[1:] / degrees.sum()
    rho = np.clip(factors, 0, 1) ** (n * exchanges_per_step)
    return float((1 / (1 - rho)).sum() / n) if rho.max() < 1 - 1e-12 else None


def _laplacian_spectrum(mixing: Mixing) -> tuple[Array, Array]:
    """Degrees and ascending Laplacian eigenvalues of the graph that has the edges of all rounds."""
    n = mixing.size
    adjacency = np.zeros((n, n))
    for round in range(mixing.period or SAMPLED_ROUNDS):
        ranks, peers, _ = mixing.entries(round)
        adjacency[ranks, peers] += ranks != peers
    degrees = adjacency.sum(axis=1)
    if isinstance(mixing, CayleyMixing):  # the FFT of one row gives all eigenvalues
        return degrees, np.sort(degrees - np.fft.fftn(adjacency[0].reshape(mixing.shape)).real.ravel())
    return degrees, np.asarray(np.linalg.eigvalsh(np.diag(degrees) - adjacency), dtype=np.float64)


MODELS = {
    "allreduce": Model(cost.allreduce, _of_equal_replicas, takes_groups=False, averages_gradients=True),
    "delay-by-one": Model(cost.delay_by_one, _of_mixing),
    "dpsgd": Model(cost.dpsgd, _of_mixing, has_topology=True),
    "adpsgd": Model(cost.adpsgd, _of_pairs, synchronous=False, has_topology=True),
    "local-sgd": Model(cost.local_sgd, _of_rounds, synchronous=False, has_topology=True, local_steps=cost.LOCAL_STEPS),
}
"""By the name of the strategy on the command line."""
