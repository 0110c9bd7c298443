"""Spectra of mixings that are too large for dense matrices and have no symmetry: Lanczos and random probes.

This module needs scipy. Without scipy its import raises MissingExtraError.
"""

from __future__ import annotations

import bisect

import numpy as np

from roundelay.errors import MissingExtraError, TopologyError
from roundelay.topology.mixing import DENSE_LIMIT, TOLERANCE, Array, Mixing
from roundelay.topology.spectrum import Spectrum
from roundelay.topology.stacks import ONE_PERCENT, rounds_at_rate

try:
    from scipy import sparse
    from scipy.sparse import linalg
except ImportError as error:
    raise MissingExtraError(
        f"the spectrum of an irregular graph of more than {DENSE_LIMIT} learners", "analysis"
    ) from error

PROBES = 16  # random vectors per trace; at these sizes the standard error of the trace is a few per mille
LANCZOS_STEPS = 300
MARGIN = 1e-7  # distance of an inversion's shift from [-1, 1], so that the shifted matrix is regular


def sparse_matrix(mixing: Mixing, round: int = 0) -> sparse.csr_array:
    """W_k as a sparse matrix."""
    ranks, peers, weights = mixing.entries(round)
    return sparse.csr_array((weights, (ranks, peers)), shape=(mixing.size, mixing.size))


def large_fixed(mixing: Mixing) -> Spectrum:
    """Extreme eigenvalues by Lanczos; the trace of (I - W^2)^+ from random probes."""
    W = sparse_matrix(mixing)
    lambda_min = _smallest(W)
    rate = max(abs(_second_eigenvalue(W)), abs(lambda_min))
    variance, error = (None, None) if rate >= 1 - 1e-12 else _variance_by_probes(W)
    rounds_to_1_percent = rounds_at_rate(rate, mixing.size)
    return Spectrum(1 - rate, "fixed", None, lambda_min, None, rounds_to_1_percent, variance, error)


def smallest_eigenvalue(mixing: Mixing) -> float:
    """lambda_min of a fixed mixing."""
    return _smallest(sparse_matrix(mixing))


def _smallest(W: sparse.csr_array) -> float:
    try:
        return _extreme(W, "SA")
    except linalg.ArpackNoConvergence:
        return float(_nearest(W, -1 - MARGIN, count=1)[0])


def _second_eigenvalue(W: sparse.csr_array) -> float:
    centred = linalg.LinearOperator(W.shape, dtype=np.float64, matvec=lambda x: W @ x - x.mean())
    try:
        return _extreme(centred, "LA")
    except linalg.ArpackNoConvergence:
        return float(_nearest(W, 1 + MARGIN, count=2).min())


def large_periodic(mixing: Mixing) -> Spectrum:
    """The spectrum of a mixing that reaches the exact mean within its period.

    Raises TopologyError for every other mixing.
    """
    phases = 0 if mixing.drift else mixing.period or 0
    rounds = [sparse_matrix(mixing, phase) for phase in range(phases)]
    probes = _probes(mixing.size)
    values, exact_after = probes, None
    for count, W in enumerate(rounds, start=1):
        values = W @ values
        if abs(values).max() < TOLERANCE:
            exact_after = count
            break
    if exact_after is None:
        raise TopologyError(
            f"{mixing!r} changes from round to round, has no symmetry to use and never averages exactly: "
            f"its spectrum is computed for at most {DENSE_LIMIT} learners"
        )
    lambda_min = min(_smallest(W) for W in rounds)
    # The error never grows, so bisection finds the first r below 1 %.
    first = bisect.bisect_left(range(1, exact_after), 1, key=lambda r: _squared_error(rounds[:r]) <= ONE_PERCENT)
    variance, error = _finite_variance(rounds, probes)
    return Spectrum(1.0, "periodic", None, lambda_min, exact_after, 1 + first, variance, error)


def _squared_error(rounds: list[sparse.csr_array]) -> float:
    """|W_{r-1} ... W_0 - J/n|_2^2: the largest eigenvalue of the product's square, by Lanczos."""
    size = rounds[0].shape[0]

    def product_squared(x: Array) -> Array:
        for W in (*rounds, *reversed(rounds)):
            x = W @ x
        return np.asarray(x - x.mean())

    return max(0.0, _extreme(linalg.LinearOperator((size, size), dtype=np.float64, matvec=product_squared), "LA"))


def _finite_variance(rounds: list[sparse.csr_array], probes: Array) -> tuple[float, float]:
    """Mean of tr(S_k)/n: S_k sums the squared products of the last 0, 1, 2, ... rounds, which vanish within two periods."""
    per_phase = []
    for last in range(len(rounds)):
        values, total = probes, (probes**2).sum(axis=0)
        for back in range(2 * len(rounds)):  # newest round first, because the product acts on z^T from the right
            values = rounds[(last - back) % len(rounds)] @ values
            added = (values**2).sum(axis=0)
            total += added
            if added.max() < TOLERANCE:
                break
        per_phase.append(total / len(probes))
    return _mean_and_error(np.mean(per_phase, axis=0))


def _extreme(operator: linalg.LinearOperator | sparse.csr_array, which: str) -> float:
    start = np.random.default_rng(0).standard_normal(operator.shape[0])
    found = linalg.eigsh(operator, k=1, which=which, v0=start, maxiter=LANCZOS_STEPS, return_eigenvectors=False)
    return float(found[0])


def _nearest(W: sparse.csr_array, shift: float, count: int) -> Array:
    """Eigenvalues nearest to `shift`, by inversion. Plain Lanczos is too slow if eigenvalues crowd, as on paths and grids."""
    start = np.random.default_rng(0).standard_normal(W.shape[0])
    near = linalg.eigsh(sparse.csc_array(W), k=count, sigma=shift, which="LM", v0=start, return_eigenvectors=False)
    return np.asarray(near)


def _variance_by_probes(W: sparse.csr_array) -> tuple[float, float]:
    """tr((I - W^2)^+) / n by Hutchinson's probes z; (I - W^2)^+ = ((I - W)^+ + (I + W)^-1) / 2 needs sparse matrices only."""
    size = W.shape[0]
    identity, probes = sparse.eye_array(size), _probes(size)
    solutions = _solve(sparse.csc_array(identity - W), probes) + _solve(sparse.csc_array(identity + W), probes)
    return _mean_and_error((probes * solutions).sum(axis=0) / (2 * size))


def _solve(A: sparse.csc_array, right: Array) -> Array:
    """A^+ times vectors of mean zero, up to a constant; by conjugate gradients, or by elimination if those converge slowly."""
    solutions = np.zeros_like(right)
    for column, z in enumerate(right.T):
        y, failed = linalg.cg(A, z, rtol=1e-8, maxiter=1000)
        if failed:
            # Fixing learner 0 at zero makes I - W regular. This adds a constant, which a z of mean zero does not see.
            solutions[1:] = linalg.splu(A[1:, 1:]).solve(right[1:])
            return solutions
        solutions[:, column] = y
    return solutions


def _probes(size: int) -> Array:
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(size, PROBES))
    return np.asarray(signs - signs.mean(axis=0))


def _mean_and_error(samples: Array) -> tuple[float, float]:
    return float(samples.mean()), float(samples.std(ddof=1) / np.sqrt(len(samples)))
