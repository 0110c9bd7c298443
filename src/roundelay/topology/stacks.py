"""The spectrum of a periodic mixing from the stacked blocks of its rounds. A fixed mixing has a period of one round."""

from __future__ import annotations

import bisect
import functools
import itertools
import math

import numpy as np
import numpy.typing as npt

from roundelay.topology.mixing import TOLERANCE, Mixing

Blocks = npt.NDArray[np.complex128] | npt.NDArray[np.float64]

ONE_PERCENT = 0.01
CERTAINLY_ONE = 1 - 1e-12  # with this factor per round or a larger one, differences never die out
MOST_DOUBLINGS = 46  # after 2^46 periods a factor below CERTAINLY_ONE has made every difference vanish


class Stack:
    """W_0 - J/n, ..., W_{p-1} - J/n of one period, each as a stack of blocks (m, b, b), so that NumPy works on all at once."""

    def __init__(self, size: int, rounds: list[Blocks], drift: int = 0) -> None:
        self.size = size
        self._rounds = rounds
        self._hermitian = len(rounds) == 1 and not drift
        if drift:
            # W_k = S^k W_0 S^-k for the shift S, so W_{r-1} ... W_0 = S^r (S^-1 W_0)^r: one phase stands for n of them.
            rounds = [np.roll(rounds[0], -drift, axis=1)]
        elif self._hermitian:
            rounds = [_diagonal(rounds[0])]
        self.phases = [_without_mean(round) for round in rounds]

    @classmethod
    def of(cls, mixing: Mixing) -> Stack | None:
        """The stack of a fixed or periodic mixing; None if it would be too large."""
        rounds: list[Blocks] = []
        for round in range(1 if mixing.drift else mixing.period or 0):
            blocks = mixing.blocks(round)
            if blocks is None:
                return None
            rounds.append(blocks)
        return cls(mixing.size, rounds, mixing.drift)

    @functools.cached_property
    def lambda_min(self) -> float:
        """The smallest eigenvalue of any round's W."""
        smallest = min(float(_eigenvalues(round).min()) for round in self._rounds)
        # An eigenvalue this small is rounding error: the averaging of a group is a projection, with eigenvalues 0 and 1.
        return smallest if abs(smallest) > 1e-12 else 0.0

    @functools.cached_property
    def product(self) -> Blocks:
        """W_{p-1} ... W_0 - J/n."""
        return functools.reduce(lambda before, phase: phase @ before, self.phases)

    @functools.cached_property
    def rate(self) -> float:
        """Asymptotic factor per round: the spectral radius of the product, to the power 1/p."""
        if self.exact_after is not None:
            return 0.0
        eigenvalues = _eigenvalues(self.product) if self._hermitian else np.linalg.eigvals(self.product)
        return float(np.abs(eigenvalues).max() ** (1 / len(self.phases)))

    @functools.cached_property
    def exact_after(self) -> int | None:
        """The first r with W_{r-1} ... W_0 = J/n; None if there is none within a period, and so none at all."""
        if self.size == 1:
            return 0
        product = _identity(self.phases[0])
        for rounds, phase in enumerate(self.phases, start=1):
            product = phase @ product
            if np.linalg.norm(product) < TOLERANCE:
                return rounds
        return None

    def rounds_to(self, target: float) -> int | None:
        """Smallest r with |W_{r-1} ... W_0 - J/n|_2^2 <= `target`; None if there is none.

        The search doubles the number of periods, then bisects.
        """
        if self.size == 1:
            return 0
        if self.rate >= CERTAINLY_ONE:
            return None
        powers = [self.product]
        while _norm2(powers[-1]) > target:
            powers.append(powers[-1] @ powers[-1])
        product, periods = _identity(self.phases[0]), 0
        for exponent in reversed(range(len(powers) - 1)):
            further = powers[exponent] @ product
            if _norm2(further) > target:
                product, periods = further, periods + (1 << exponent)
        products: list[Blocks] = list(
            itertools.accumulate(self.phases, lambda before, phase: phase @ before, initial=product)
        )
        # No round makes the norm larger, so the first one at the target is found by bisection.
        below = bisect.bisect_left(range(len(products)), True, key=lambda index: _norm2(products[index]) <= target)
        return periods * len(self.phases) + below

    def stationary_variance(self) -> float | None:
        """Mean over phases of tr(S_k)/n, where S_{k+1} = W_k S_k W_k^T + I - J/n and S_p = S_0; None if it has no bound.

        This Lyapunov equation is solved by doubling. It has no solution if the product does not vanish.
        """
        noise = _identity(self.phases[0])
        covariance = np.zeros_like(noise)
        for phase in self.phases:
            covariance = phase @ covariance @ _adjoint(phase) + noise
        power, doublings = self.product, 0
        while np.abs(power).max() > 1e-16:
            if doublings == MOST_DOUBLINGS:
                return None
            covariance = covariance + power @ covariance @ _adjoint(power)
            power, doublings = power @ power, doublings + 1
        total = 0.0
        for phase in self.phases:
            covariance = phase @ covariance @ _adjoint(phase) + noise
            total += float(np.trace(covariance, axis1=1, axis2=2).real.sum())
        return total / len(self.phases) / self.size


def rounds_at_rate(rate: float, size: int) -> int | None:
    """The first r with rate^(2r) <= 1 %; 0 for a single learner, None if there is none."""
    if size == 1:
        return 0
    if rate >= 1 - 1e-15:
        return None
    return 1 if rate <= 0 else max(1, math.ceil(math.log(ONE_PERCENT) / (2 * math.log(rate)) - 1e-9))


def _diagonal(blocks: Blocks) -> Blocks:
    """A fixed W in its eigenbasis: n blocks of size 1, the mean's eigenvalue first."""
    if blocks.shape[1] == 1:
        return blocks
    eigenvalues = np.linalg.eigvalsh(_without_mean(blocks)).ravel()
    mean = int(np.argmin(np.abs(eigenvalues)))  # or another eigenvalue 0; which one of them is removed does not matter
    return np.concatenate([[1.0], np.delete(eigenvalues, mean)]).reshape(-1, 1, 1)


def _without_mean(blocks: Blocks) -> Blocks:
    reduced = blocks.copy()
    reduced[0] -= 1 / blocks.shape[1]
    return reduced


def _identity(like: Blocks) -> Blocks:
    """I - J/n as a stack."""
    identity = np.zeros_like(like)
    identity[:] = np.eye(like.shape[1])
    return _without_mean(identity)


def _adjoint(stack: Blocks) -> Blocks:
    return stack.conj().swapaxes(1, 2)


def _eigenvalues(stack: Blocks) -> npt.NDArray[np.float64]:
    """Eigenvalues of Hermitian blocks; a block of size 1 is its own eigenvalue."""
    return np.asarray(stack.real if stack.shape[1] == 1 else np.linalg.eigvalsh(stack), dtype=np.float64)


def _norm2(stack: Blocks) -> float:
    """Squared spectral norm: the largest eigenvalue of A^H A over all blocks."""
    return float(_eigenvalues(_adjoint(stack) @ stack).max())
