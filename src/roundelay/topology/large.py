"""Spectra of mixings too large for dense matrices, without a symmetry that makes them small: Lanczos and probes."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

from roundelay.errors import TopologyError
from roundelay.topology.mixing import DENSE_LIMIT, TOLERANCE, Array, Mixing

ONE_PERCENT = 0.01
PROBES = 16  # random vectors behind a trace; at these sizes its standard error is a few per mille
LANCZOS_STEPS = 300
HARD_BY = 1e-7  # how far outside [-1, 1] the shift of an inversion stands, so that it is regular


@dataclass(frozen=True)
class Large:
    """Factor per round, smallest eigenvalue, rounds to the exact mean and to 1 %, stationary variance, its error."""

    rate: float
    lambda_min: float
    exact_after: int | None
    rounds_to_1_percent: int | None
    variance: float | None
    variance_error: float | None


def large_fixed(mixing: Mixing) -> Large:
    """Extreme eigenvalues by Lanczos; the trace of (I - W^2)^+ from random probes."""
    W = mixing.sparse()
    lambda_min = smallest_eigenvalue(W)
    rate = max(abs(_second_eigenvalue(W)), abs(lambda_min))
    variance, error = (None, None) if rate >= 1 - 1e-12 else _variance_by_probes(W)
    return Large(rate, lambda_min, None, rounds_at_rate(rate, mixing.size), variance, error)


def smallest_eigenvalue(W: sparse.csr_array) -> float:
    """lambda_min(W)."""
    try:
        return _extreme(W, "SA")
    except linalg.ArpackNoConvergence:
        return float(_nearest(W, -1 - HARD_BY, count=1)[0])


def _second_eigenvalue(W: sparse.csr_array) -> float:
    centred = linalg.LinearOperator(W.shape, dtype=np.float64, matvec=lambda x: W @ x - x.mean())
    try:
        return _extreme(centred, "LA")
    except linalg.ArpackNoConvergence:
        return float(_nearest(W, 1 + HARD_BY, count=2).min())


def large_periodic(mixing: Mixing) -> Large:
    """A mixing that reaches the exact mean within its period; others of this size are refused."""
    rounds = [] if mixing.drift or mixing.period is None else [mixing.sparse(phase) for phase in range(mixing.period)]
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
    lambda_min = min(smallest_eigenvalue(W) for W in rounds)
    # The error never grows, so that the first r below 1 % is found by bisection.
    first = bisect.bisect_left(range(1, exact_after), 1, key=lambda r: squared_error(rounds[:r]) <= ONE_PERCENT)
    variance, error = _finite_variance(rounds, probes)
    return Large(0.0, lambda_min, exact_after, 1 + first, variance, error)


def squared_error(rounds: list[sparse.csr_array]) -> float:
    """|W_{r-1} ... W_0 - J/n|_2^2, the largest eigenvalue of its square, by Lanczos."""
    size = rounds[0].shape[0]

    def there_and_back(x: Array) -> Array:
        for W in (*rounds, *reversed(rounds)):
            x = W @ x
        return np.asarray(x - x.mean())

    return max(0.0, _extreme(linalg.LinearOperator((size, size), dtype=np.float64, matvec=there_and_back), "LA"))


def _finite_variance(rounds: list[sparse.csr_array], probes: Array) -> tuple[float, float]:
    """tr(S_k)/n, S_k = sum over s of the products of the last s rounds, squared; they vanish after a period or two."""
    per_phase = []
    for last in range(len(rounds)):
        values, total = probes, (probes**2).sum(axis=0)
        for back in range(2 * len(rounds)):  # S_k multiplies from the left, so z^T walks back in time
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
    """Eigenvalues nearest to `shift`, by inversion: where they crowd (paths, grids) plain Lanczos is too slow."""
    start = np.random.default_rng(0).standard_normal(W.shape[0])
    near = linalg.eigsh(sparse.csc_array(W), k=count, sigma=shift, which="LM", v0=start, return_eigenvectors=False)
    return np.asarray(near)


def _variance_by_probes(W: sparse.csr_array) -> tuple[float, float]:
    """Hutchinson: E z^T (I - W^2)^+ z / n, where (I - W^2)^+ = ((I - W)^+ + (I + W)^-1) / 2 keeps it sparse."""
    size = W.shape[0]
    identity, probes = sparse.eye_array(size), _probes(size)
    solutions = _solve(sparse.csc_array(identity - W), probes) + _solve(sparse.csc_array(identity + W), probes)
    return _mean_and_error((probes * solutions).sum(axis=0) / (2 * size))


def _solve(A: sparse.csc_array, right: Array) -> Array:
    """A^+ applied to vectors of mean zero, up to a constant: conjugate gradients, elimination where they are slow."""
    solutions = np.zeros_like(right)
    for column, z in enumerate(right.T):
        y, failed = linalg.cg(A, z, rtol=1e-8, maxiter=1000)
        if failed:
            # Holding learner 0 at zero makes I - W regular, and z of mean zero is blind to the constant this adds.
            solutions[1:] = linalg.splu(A[1:, 1:]).solve(right[1:])
            return solutions
        solutions[:, column] = y
    return solutions


def _probes(size: int) -> Array:
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(size, PROBES))
    return np.asarray(signs - signs.mean(axis=0))


def _mean_and_error(samples: Array) -> tuple[float, float]:
    return float(samples.mean()), float(samples.std(ddof=1) / np.sqrt(len(samples)))


def rounds_at_rate(rate: float, size: int) -> int | None:
    """Rounds until rate^(2r) <= 1 %; 0 for a single learner, None if never."""
    if size == 1:
        return 0
    if rate >= 1 - 1e-15:
        return None
    return 1 if rate <= 0 else max(1, math.ceil(math.log(ONE_PERCENT) / (2 * math.log(rate)) - 1e-9))
