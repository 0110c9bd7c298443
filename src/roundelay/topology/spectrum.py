r"""How fast a mixing brings learners together: exact if there is a closed form or a small matrix, else estimated.

With J/n the averaging matrix and $X_{k+1} = W_k X_k$:

* fixed W: gap $= 1 - \max(|\lambda_2|, |\lambda_n|)$;
* random $W_k$: gap $= 1 - \sqrt\rho$, $\rho = \lambda_{\max}(E[W^T W] - J/n)$; for a W relabelled uniformly at random
  $\rho = (\|W\|_F^2 - 1)/(n - 1)$ exactly, otherwise $\rho$ is estimated and the spectrum says so;
* periodic $W_k$: gap $= 1 - r^{1/p}$ with r the spectral radius of the product over one period of p rounds, minus J/n.

The squared error of the worst start after r rounds is $\|W_{r-1} \cdots W_0 - J/n\|_2^2$ (for random mixing its
expectation, $\rho^r$). Stationary variance is that of $X \leftarrow WX - \alpha G$ with independent noise G of variance
$\sigma^2$: the mean squared distance of a learner from consensus, in units of $(\alpha\sigma)^2$.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeGuard

from roundelay.topology.estimate import estimated_contraction, estimated_variance
from roundelay.topology.mixing import Mixing, RelabelledMixing
from roundelay.topology.stacks import ONE_PERCENT, Stack, rounds_at_rate

GapKind = Literal["fixed", "expected", "periodic", "estimated"]


@dataclass(frozen=True)
class Spectrum:
    """What theory says about a mixing.

    Attributes:
        gap: 1 - the factor by which a round shrinks the distance from consensus.
        kind: how the gap is defined for this mixing, or "estimated".
        gap_error: standard error of an estimated gap, else None.
        lambda_min: the smallest eigenvalue of any round's W; see `stability_bound`.
        exact_after: rounds after which every learner has the exact mean; None if never.
        rounds_to_1_percent: rounds until the squared error of the worst start is 1 %; None if never.
        stationary_variance: in units of (alpha sigma)^2; None if it grows without bound, or settles too slowly
            to be estimated.
        stationary_variance_error: standard error of an estimated variance, else None.
    """

    gap: float
    kind: GapKind
    gap_error: float | None
    lambda_min: float
    exact_after: int | None
    rounds_to_1_percent: int | None
    stationary_variance: float | None
    stationary_variance_error: float | None = None


def spectrum(mixing: Mixing) -> Spectrum:
    """Everything theory says about a mixing.

    Raises TopologyError if the mixing is too large, and MissingExtraError if it is so large that scipy is needed.

    >>> from roundelay.topology import ring
    >>> s = spectrum(ring(16))
    >>> round(s.gap, 5), s.rounds_to_1_percent, round(s.stationary_variance, 3)
    (0.05075, 45, 2.41)
    """
    if _has_closed_form(mixing):
        return _relabelled(mixing)
    if mixing.period is None:
        return _estimated(mixing)
    stack = Stack.of(mixing)
    if stack is None:
        from roundelay.topology.large import large_fixed, large_periodic

        return large_fixed(mixing) if mixing.period == 1 else large_periodic(mixing)
    return Spectrum(
        gap=1 - stack.rate,
        kind="fixed" if mixing.period == 1 else "periodic",
        gap_error=None,
        lambda_min=stack.lambda_min,
        exact_after=stack.exact_after,
        rounds_to_1_percent=stack.rounds_to(ONE_PERCENT),
        stationary_variance=stack.stationary_variance(),
    )


def spectral_gap(mixing: Mixing) -> float:
    """1 - the factor by which a round shrinks the distance from consensus.

    >>> from roundelay.topology import ring
    >>> spectral_gap(ring(16))
    0.0507...
    """
    stack = None if mixing.period is None else Stack.of(mixing)
    return spectrum(mixing).gap if stack is None else 1 - stack.rate


def stationary_variance(mixing: Mixing) -> float | None:
    """The `stationary_variance` of `spectrum`, without its other figures, which take most of the time."""
    if _has_closed_form(mixing):
        return _relabelled_variance(mixing)
    stack = None if mixing.period is None else Stack.of(mixing)
    return spectrum(mixing).stationary_variance if stack is None else stack.stationary_variance()


def stability_bound(mixing: Mixing, momentum: float = 0.0) -> float:
    r"""Largest stable $\alpha h$ of averaging while computing on curvature h: $(1 + \lambda_{\min}(W))(1 + \beta)$.

    The gradient is taken at the weights before the averaging. That is why a negative eigenvalue lowers the bound.

    >>> from roundelay.topology import ring
    >>> round(stability_bound(ring(16)), 4)
    0.6667
    """
    return (1 + spectrum(mixing).lambda_min) * (1 + momentum)


def _has_closed_form(mixing: Mixing) -> TypeGuard[RelabelledMixing]:
    return isinstance(mixing, RelabelledMixing) and mixing.base.period == 1


def _relabelled_rho(mixing: RelabelledMixing) -> float:
    """The factor on the expected squared distance per round, rho = (|W|_F^2 - 1) / (n - 1)."""
    if mixing.size == 1:
        return 0.0
    frobenius2 = float((mixing.base.entries()[2] ** 2).sum())
    return max(0.0, (frobenius2 - 1) / (mixing.size - 1))


def _relabelled_variance(mixing: RelabelledMixing) -> float | None:
    n, rho = mixing.size, _relabelled_rho(mixing)
    return (n - 1) / n / (1 - rho) if rho < 1 else None


def _relabelled(mixing: RelabelledMixing) -> Spectrum:
    rho = _relabelled_rho(mixing)
    stack = Stack.of(mixing.base)
    if stack is None:
        from roundelay.topology.large import smallest_eigenvalue

        lambda_min, exact_after = smallest_eigenvalue(mixing.base), None
    else:
        lambda_min, exact_after = stack.lambda_min, stack.exact_after
    return Spectrum(
        gap=1 - math.sqrt(rho),
        kind="expected",
        gap_error=None,
        lambda_min=lambda_min,
        exact_after=exact_after,
        rounds_to_1_percent=rounds_at_rate(math.sqrt(rho), mixing.size),
        stationary_variance=_relabelled_variance(mixing),
    )


def _estimated(mixing: Mixing) -> Spectrum:
    rho, rho_error, lambda_min = estimated_contraction(mixing)
    variance, variance_error = estimated_variance(mixing, rho)
    rate = math.sqrt(rho)
    return Spectrum(
        gap=1 - rate,
        kind="estimated",
        gap_error=rho_error / (2 * rate) if rate else 0.0,
        lambda_min=lambda_min,
        exact_after=None,
        rounds_to_1_percent=rounds_at_rate(rate, mixing.size),
        stationary_variance=variance,
        stationary_variance_error=variance_error,
    )
