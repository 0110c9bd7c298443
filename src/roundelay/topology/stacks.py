"""The spectrum of a periodic mixing from the stacked blocks of its rounds; a fixed mixing has a period of one round."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from roundelay.topology.mixing import TOLERANCE, Mixing

Blocks = npt.NDArray[np.complex128] | npt.NDArray[np.float64]

NEVER = 60  # doublings (2^60 periods) after which something that has not died out will not


class Stack:
    """W_0 - J/n, ..., W_{p-1} - J/n of one period as stacks of blocks (m, b, b), on which all matrix maths is batched."""

    def __init__(self, size: int, phases: list[Blocks]) -> None:
        self.size = size
        self.phases = [_without_mean(phase) for phase in phases]

    @classmethod
    def of(cls, mixing: Mixing) -> Stack | None:
        """The stack of a fixed or periodic mixing, None where it is too large for one."""
        phases: list[Blocks] = []
        for round in range(mixing.period or 0):
            blocks = mixing.blocks(round)
            if blocks is None:
                return None
            phases.append(blocks)
        return cls(mixing.size, phases)

    @functools.cached_property
    def product(self) -> Blocks:
        """W_{p-1} ... W_0 - J/n."""
        return functools.reduce(lambda before, phase: phase @ before, self.phases)

    def rate(self) -> float:
        """Asymptotic factor per round: spectral radius of the product, to the power 1/p."""
        if self.exact_after() is not None:
            return 0.0
        if len(self.phases) == 1:
            return float(abs(np.linalg.eigvalsh(self.product)).max())
        return float(abs(np.linalg.eigvals(self.product)).max()) ** (1 / len(self.phases))

    def lambda_min(self) -> float:
        """The smallest eigenvalue of any round's W."""
        smallest = min(float(np.linalg.eigvalsh(_with_mean(phase)).min()) for phase in self.phases)
        return smallest if abs(smallest) > 1e-12 else 0.0  # averaging is a projection: its zeros are exact

    def exact_after(self) -> int | None:
        """The first r with W_{r-1} ... W_0 = J/n."""
        if self.size == 1:
            return 0
        product = _identity(self.phases[0])
        for rounds, phase in enumerate(self.phases, start=1):
            product = phase @ product
            if np.linalg.norm(product) < TOLERANCE:
                return rounds
        return None

    def squared_error(self, rounds: int) -> float:
        """|W_{r-1} ... W_0 - J/n|_2^2."""
        periods, rest = divmod(rounds, len(self.phases))
        product = np.linalg.matrix_power(self.product, periods) if periods else _identity(self.phases[0])
        for phase in self.phases[:rest]:
            product = phase @ product
        return _norm2(product)

    def rounds_to(self, target: float) -> int | None:
        """Smallest r whose squared error is at most `target`: doubling, then bisection over periods, then round by round."""
        if self.size == 1:
            return 0
        powers = [self.product]
        while _norm2(powers[-1]) > target:
            if len(powers) > NEVER:
                return None
            powers.append(powers[-1] @ powers[-1])
        product, periods = _identity(self.phases[0]), 0
        for exponent in reversed(range(len(powers) - 1)):
            further = powers[exponent] @ product
            if _norm2(further) > target:
                product, periods = further, periods + (1 << exponent)
        for rounds, phase in enumerate(self.phases, start=1):
            product = phase @ product
            if _norm2(product) <= target:
                return periods * len(self.phases) + rounds
        raise AssertionError("the period after the last one above the target must end below it")

    def stationary_variance(self) -> float | None:
        """Mean over phases of tr(S_k)/n, where S_{k+1} = W_k S_k W_k + I - J/n and S_p = S_0 (Lyapunov, by doubling)."""
        noise = _identity(self.phases[0])
        if self.exact_after() is None and self.rate() >= 1 - 1e-12:
            return None
        covariance = np.zeros_like(noise)
        for phase in self.phases:
            covariance = phase @ covariance @ phase + noise
        power, doublings = self.product, 0
        while np.abs(power).max() > 1e-16 and doublings < NEVER:
            covariance = covariance + power @ covariance @ _adjoint(power)
            power, doublings = power @ power, doublings + 1
        total = 0.0
        for phase in self.phases:
            covariance = phase @ covariance @ phase + noise
            total += float(np.trace(covariance, axis1=1, axis2=2).real.sum())
        return total / len(self.phases) / self.size


def _without_mean(blocks: Blocks) -> Blocks:
    reduced = blocks.copy()
    reduced[0] -= 1 / blocks.shape[1]
    return reduced


def _with_mean(blocks: Blocks) -> Blocks:
    restored = blocks.copy()
    restored[0] += 1 / blocks.shape[1]
    return restored


def _identity(like: Blocks) -> Blocks:
    """I - J/n as a stack."""
    return _without_mean(np.broadcast_to(np.eye(like.shape[1], dtype=like.dtype), like.shape))


def _adjoint(stack: Blocks) -> Blocks:
    return stack.conj().swapaxes(1, 2)


def _norm2(stack: Blocks) -> float:
    """Squared spectral norm: the largest eigenvalue of A^H A over the stack."""
    return float(np.linalg.eigvalsh(_adjoint(stack) @ stack).max())

