r"""Claim 5: the convergence rate is $O(1/\sqrt{K})$ with linear speed-up in n; the transient grows with the inverse gap.

Setting: quadratics $f_i(x) = \tfrac{h_i}{2}(x - b_i)^2$ with gradient noise of variance $\sigma^2$; every learner has
its own curvature and minimum. DPSGD, $x \leftarrow W x - \alpha (h \odot (x - b) + \text{noise})$, is then linear,
and $A = W - \alpha\,\mathrm{diag}(h)$ is symmetric. So the mean over K steps of $E\,|\nabla f(\bar x_k)|^2$ is a sum
of geometric series in the eigenvalues of A. This sum is the prediction. It is compared with runs of the recursion with
sampled noise.

Figures: the exponents of the mean squared gradient in K and in n, and of the transient in the inverse gap. The
transient is the number of steps until a ring is as good as full averaging, up to a factor 2.

Verdict: reproduced if both exponents of the gradient are within 0.1 of -0.5 and the exponent of the transient is
positive with 95 % confidence. Not reproduced if one of the first two is above -0.4, or the last is negative, with 95
% confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roundelay.papers.claim import Claim, Figures, Finding, Interval, Line, Panel, Progress, verdict_from
from roundelay.topology import Mixing, complete, from_matrix, ring, spectral_gap
from roundelay.topology.mixing import Array

SIGMA, STEP = 4.0, 0.2  # alpha = STEP sqrt(n / K), as the theorems choose it
COPIES = 128  # independent coordinates of one run; they reduce the sampling error
STEPS = tuple(2**power for power in range(6, 15))
MEASURED = STEPS[::2]
SIZES = (1, 2, 4, 8, 16, 32)
LAZINESS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)  # e in W' = (1 - e) I + e W: the smaller e, the smaller the gap
TRANSIENT_SIZE, TWICE = 16, 2.0
UNLIKE = (
    100.0  # standard deviation of the learners' minima; if they are close, a ring is never twice as bad: no transient
)
LONG = tuple(2.0**power for power in range(4, 47))


@dataclass(frozen=True)
class _Quadratics:
    """h_i and b_i of every learner; the gradient of the mean loss is mean(h) x - mean(h b)."""

    h: Array
    b: Array

    @classmethod
    def drawn(cls, learners: int, seed: int, unlike: float = 1.0) -> _Quadratics:
        """Random curvatures and minima with fixed means, so that only noise and mixing depend on the number of learners.

        `unlike` is the standard deviation of the learners' minima.
        """
        rng = np.random.default_rng((seed, learners))
        h, b = rng.uniform(0.5, 1.5, learners), unlike * rng.standard_normal(learners)
        h *= 1 / h.mean()
        return cls(h, b - (h * b).mean() + 2.0)  # the minimum of the mean loss is at 2; all learners start at 0


def _alpha(learners: int, steps: float) -> float:
    return float(STEP * np.sqrt(learners / steps))


def predicted(problem: _Quadratics, W: Array, steps: float) -> float:
    r"""$\frac1K \sum_k E|\nabla f(\bar x_k)|^2$ of the recursion, exactly."""
    n, alpha = len(W), _alpha(len(W), steps)
    values, Q = np.linalg.eigh(W - alpha * np.diag(problem.h))
    a = Q.T @ np.full(n, 1 / n)  # share of each eigenvector in the mean model
    gain = alpha * (Q.T @ (problem.h * problem.b))
    settled = gain / (1 - values)  # m_k = settled - settled * values^k from a start at 0
    bias = float(a @ settled) - float((problem.h * problem.b).mean())
    drift = a * settled
    mean2 = bias**2 - 2 * bias * float(drift @ _series(values, steps)) / steps
    mean2 += float(drift @ _series(np.outer(values, values), steps) @ drift) / steps
    noise = (alpha * SIGMA) ** 2 * a**2
    variance = float(noise @ ((1 - _series(values**2, steps) / steps) / (1 - values**2)))
    return mean2 + variance


def _series(ratio: Array, steps: float) -> Array:
    """1 + r + ... + r^(K-1)."""
    return np.asarray((1 - ratio**steps) / (1 - ratio))


def measured(problem: _Quadratics, W: Array, steps: int, seed: int) -> float:
    """The same quantity from a run with sampled noise, in COPIES independent coordinates."""
    n, alpha = len(W), _alpha(len(W), steps)
    rng = np.random.default_rng((seed, n, steps))
    x, total = np.zeros((n, COPIES)), 0.0
    A, gain = W - alpha * np.diag(problem.h), (alpha * problem.h * problem.b)[:, None]
    for _ in range(steps):
        total += float(np.mean((x.mean(axis=0) - 2.0) ** 2))
        x = A @ x + gain + alpha * SIGMA * rng.standard_normal((n, COPIES))
    return total / steps


def _lazy(laziness: float) -> Mixing:
    W = ring(TRANSIENT_SIZE).matrix()
    return from_matrix((1 - laziness) * np.eye(TRANSIENT_SIZE) + laziness * W, "lazy ring")


def transient(problem: _Quadratics, mixing: Mixing) -> float:
    """Steps K after which the mean squared gradient stays below twice that of full averaging, interpolated.

    NaN if the mean squared gradient is never twice as large: then there is no transient.
    """
    W, mean = mixing.matrix(), complete(mixing.size).matrix()
    ratios = [predicted(problem, W, K) / predicted(problem, mean, K) for K in LONG]
    last = max((i for i, ratio in enumerate(ratios) if ratio > TWICE), default=None)
    if last is None:
        return math.nan
    assert last + 1 < len(LONG), "the longest run is still in its transient"
    (x0, x1), (y0, y1) = np.log(LONG[last : last + 2]), np.log(ratios[last : last + 2])
    return float(np.exp(x0 + (x1 - x0) * (y0 - np.log(TWICE)) / (y0 - y1)))


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of log y over log x; entries without a finite y are left out."""
    finite = np.isfinite(y)
    return float(np.polyfit(np.log(x)[finite], np.log(y)[finite], 1)[0])


def experiment(seeds: Sequence[int], progress: Progress) -> Finding:
    """Measure the exponents in K, in n and in the inverse gap."""
    in_steps, in_size, errors, transients = [], [], [], []
    gaps = [spectral_gap(_lazy(laziness)) for laziness in LAZINESS]
    for done, seed in enumerate(seeds):
        ring16 = ring(16).matrix()
        problem = _Quadratics.drawn(16, seed)
        in_steps.append([measured(problem, ring16, K, seed) for K in MEASURED])
        errors.append([in_steps[-1][i] / predicted(problem, ring16, K) for i, K in enumerate(MEASURED)])
        in_size.append([measured(_Quadratics.drawn(n, seed), complete(n).matrix(), STEPS[-2], seed) for n in SIZES])
        unlike = _Quadratics.drawn(TRANSIENT_SIZE, seed, UNLIKE)
        transients.append([transient(unlike, _lazy(laziness)) for laziness in LAZINESS])
        progress((done + 1) / len(seeds))
    steps_slope = Interval.of([_slope(MEASURED[1:], row[1:]) for row in in_steps])
    size_slope = Interval.of([_slope(SIZES, row) for row in in_size])
    gap_slope = Interval.of([_slope([1 / gap for gap in gaps], row) for row in transients])
    worst = max(abs(np.log(np.array(errors)).ravel()))
    figures: Figures = {
        "slope_in_steps": steps_slope,
        "slope_in_learners": size_slope,
        "transient_slope_in_inverse_gap": gap_slope,
        "largest_ratio_measured_to_predicted": float(np.exp(worst)),
        "gaps_without_a_transient": int(np.isnan(transients).sum()),
    }
    holds = abs(steps_slope.mean + 0.5) < 0.1 and abs(size_slope.mean + 0.5) < 0.1 and gap_slope.low > 0
    return Finding(
        verdict_from(holds=holds, fails=steps_slope.low > -0.4 or size_slope.low > -0.4 or gap_slope.high < 0),
        f"On quadratics with known constants the mean squared gradient falls as K^{steps_slope.mean:.2f} (theory: -0.5) and as "
        f"n^{size_slope.mean:.2f} at the same K (theory: -0.5, so n learners need 1/n of the steps). The steps until a ring "
        f"is as good as full averaging, up to a factor 2, grow as the inverse gap to the power {gap_slope.mean:.2f} (theory: "
        "4, asymptotically, for unlike learners); when learners are much alike, a ring is never twice as bad.",
        figures,
        _panels(seeds, in_steps, in_size, transients, gaps),
    )


def _panels(
    seeds: Sequence[int],
    in_steps: list[list[float]],
    in_size: list[list[float]],
    transients: list[list[float]],
    gaps: list[float],
) -> list[Panel]:
    def predictions(mixings: Sequence[Mixing], steps: Sequence[int]) -> list[list[float]]:
        """One row for each seed, over pairs of a mixing and a number of steps."""
        return [
            [predicted(_Quadratics.drawn(of.size, seed), of.matrix(), K) for of, K in zip(mixings, steps, strict=True)]
            for seed in seeds
        ]

    rings, means = [ring(16)] * len(STEPS), [complete(16)] * len(STEPS)
    over_steps = [
        Line("fixed ring, measured", MEASURED, in_steps),
        Line("fixed ring, predicted", STEPS, predictions(rings, STEPS), dashed=True, beside="fixed ring, measured"),
        Line("full averaging, predicted", STEPS, predictions(means, STEPS), dashed=True),
    ]
    of_size = predictions([complete(n) for n in SIZES], [STEPS[-2]] * len(SIZES))
    over_size = [Line("measured", SIZES, in_size), Line("predicted", SIZES, of_size, dashed=True, beside="measured")]
    exact = Line("exact, 16 learners", [1 / gap for gap in gaps], transients)
    gradient = "mean squared gradient"
    return [
        Panel("16 learners", "steps K", gradient, over_steps, log="xy"),
        Panel(f"K = {STEPS[-2]} steps, full averaging", "learners n", gradient, over_size, log="xy"),
        Panel("until a ring is as good as full averaging", "1 / spectral gap", "steps K", [exact], log="xy"),
    ]


CLAIM = Claim(
    name="rate",
    sentence="The convergence rate is O(1/sqrt(K)) with linear speed-up in n, after a transient that grows with the inverse gap.",
    setting="quadratics with a different curvature and minimum at every learner and known gradient noise, step size "
    f"{STEP} sqrt(n/K); the exact prediction beside runs of the recursion in {COPIES} independent coordinates",
    differs="the papers prove a bound for smooth non-convex losses and show no experiment on constants that are known",
    seed_s=2.3,
    experiment=experiment,
)
