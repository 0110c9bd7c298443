"""Spectra of random mixings without a closed form, such as a user's own: estimates from sampled rounds."""

from __future__ import annotations

import math

import numpy as np

from roundelay.errors import TopologyError
from roundelay.topology.mixing import DENSE_LIMIT, Mixing

ROUNDS = 400  # sampled to find the slowest direction, and as many to measure rho
COLUMNS = 16  # independent copies of the recursion, from which the variance is estimated
BATCHES = 20  # the rounds are split into this many batches; the means of the batches give the standard error
UNSETTLED = 1e-3  # fraction of the initial values that is left after settling
MOST_SETTLING = 2000  # rounds; no variance is estimated for a mixing that settles more slowly


def estimated_contraction(mixing: Mixing) -> tuple[float, float, float]:
    """rho = lambda_max(E[W^T W] - J/n), its standard error, and the smallest eigenvalue seen.

    The first half of the rounds finds the slowest direction, the second half measures rho along it. The same rounds for
    both would bias rho upwards. Raises TopologyError above DENSE_LIMIT learners.
    """
    n = mixing.size
    if n == 1:
        return 0.0, 0.0, 1.0
    if n > DENSE_LIMIT:
        raise TopologyError(f"{mixing!r} has no closed form; its gap is estimated for at most {DENSE_LIMIT} learners")
    squares = np.zeros((n, n))
    lambda_min = 1.0
    for round in range(ROUNDS):
        W = mixing.matrix(round)
        squares += W.T @ W / ROUNDS
        if round < 10:
            lambda_min = min(lambda_min, float(np.linalg.eigvalsh(W)[0]))
    slowest = np.linalg.eigh(squares - 1 / n)[1][:, -1]
    samples = np.array([(mixing.apply(slowest, round) ** 2).sum() for round in range(ROUNDS, 2 * ROUNDS)])
    return float(samples.mean()), float(samples.std(ddof=1) / np.sqrt(ROUNDS)), lambda_min


def estimated_variance(mixing: Mixing, rho: float) -> tuple[float | None, float | None]:
    """Stationary variance of X <- W X - G with unit noise G, and its standard error from batches of rounds.

    Each batch is as long as settling takes, so batches are nearly independent. The answer is (None, None) if rho is so
    close to 1 that settling would take too long.
    """
    settling = math.ceil(math.log(UNSETTLED) / math.log(rho)) if 0 < rho < 1 else 1
    if rho >= 1 or settling > MOST_SETTLING:
        return None, None
    length = max(settling, ROUNDS // BATCHES)
    noise = np.random.default_rng(0)
    values = np.zeros((mixing.size, COLUMNS))
    batches = np.zeros(BATCHES + 1)  # the first batch is for settling and does not count
    for round in range(len(batches) * length):
        values = mixing.apply(values, round) - noise.standard_normal(values.shape)
        values -= values.mean(axis=0)
        batches[round // length] += (values**2).mean() / length
    return float(batches[1:].mean()), float(batches[1:].std(ddof=1) / np.sqrt(BATCHES))
