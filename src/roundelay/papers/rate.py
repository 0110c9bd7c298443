r"""Claim 5: the convergence rate is $O(1/\sqrt{K})$ with linear speed-up in n; the transient grows with the inverse gap.

The problem has known constants: $f_i(x) = \tfrac{h_i}{2}(x - b_i)^2$ with gradient noise of variance $\sigma^2$, a different
curvature and minimum at every learner. DPSGD, $x \leftarrow W x - \alpha (h \odot (x - b) + \text{noise})$, is then linear,
$A = W - \alpha\,\mathrm{diag}(h)$ is symmetric, and the mean over K steps of $E\,|\nabla f(\bar x_k)|^2$ is a sum of
geometric series in the eigenvalues of A: the prediction. Beside it stand runs of the recursion with sampled noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roundelay.papers.claim import Claim, Finding, Interval, Line, Panel, Progress, judged
from roundelay.topology import Mixing, complete, ring, spectral_gap
from roundelay.topology.mixing import Array, MatrixMixing

SIGMA, STEP = 4.0, 0.2  # alpha = STEP sqrt(n / K), as the theorems choose it
COPIES = 128  # independent coordinates, each a run of its own: sampling error without more seeds
STEPS = tuple(2**power for power in range(6, 15))
MEASURED = STEPS[::2]
SIZES = (1, 2, 4, 8, 16, 32)
LAZINESS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)  # W' = (1 - e) I + e W: the ring's gap, smaller and smaller
TRANSIENT_SIZE, TWICE = 16, 2.0
UNLIKE = 100.0  # learners' own minima far apart: where they are alike a ring is never twice as bad, and there is no transient
LONG = tuple(2.0**power for power in range(4, 47))


@dataclass(frozen=True)
class _Quadratics:
    """h_i and b_i of every learner; the gradient of the mean is h_mean x - hb_mean."""

    h: Array
    b: Array

    @classmethod
    def drawn(cls, learners: int, seed: int, unlike: float = 1.0) -> _Quadratics:
        """Of the same kind for every n: means are fixed, so that only noise and mixing depend on n.

        `unlike` is how far the learners' own minima lie apart.
        """
        rng = np.random.default_rng((seed, learners))
        h, b = rng.uniform(0.5, 1.5, learners), unlike * rng.standard_normal(learners)
        h *= 1 / h.mean()
        return cls(h, b - (h * b).mean() + 2.0)  # the minimum of the mean is at 2, everyone starts at 0


def _alpha(learners: int, steps: float) -> float:
    return float(STEP * np.sqrt(learners / steps))


def predicted(problem: _Quadratics, W: Array, steps: float) -> float:
    r"""$\frac1K \sum_k E|\nabla f(\bar x_k)|^2$ of the recursion, exactly."""
    n, alpha = len(W), _alpha(len(W), steps)
    values, Q = np.linalg.eigh(W - alpha * np.diag(problem.h))
    a = Q.T @ np.full(n, 1 / n)  # how the mean model reads each eigenvector
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
    """The same by running it, with sampled noise, in many independent coordinates."""
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
    return MatrixMixing("lazy ring", (1 - laziness) * np.eye(TRANSIENT_SIZE) + laziness * W)


def transient(problem: _Quadratics, mixing: Mixing) -> float:
    """Steps K from which on the mean squared gradient is less than twice that of averaging everything, interpolated.

    Not a number where it is never twice as large, so that there is no transient.
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
    """Of log y over log x, where there is a y."""
    there = np.isfinite(y)
    return float(np.polyfit(np.log(x)[there], np.log(y)[there], 1)[0])


def experiment(seeds: Sequence[int], progress: Progress) -> Finding:
    """Slopes in K, in n and in the gap."""
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
    figures: dict[str, Interval | float | str] = {
        "slope_in_steps": steps_slope,
        "slope_in_learners": size_slope,
        "transient_slope_in_inverse_gap": gap_slope,
        "largest_ratio_measured_to_predicted": float(np.exp(worst)),
        "gaps_without_a_transient": int(np.isnan(transients).sum()),
    }
    holds = abs(steps_slope.mean + 0.5) < 0.1 and abs(size_slope.mean + 0.5) < 0.1 and gap_slope.low > 0
    return Finding(
        judged(holds=holds, fails=steps_slope.low > -0.4 or size_slope.low > -0.4 or gap_slope.high < 0),
        f"On quadratics with known constants the mean squared gradient falls as K^{steps_slope.mean:.2f} (theory: -0.5) and as "
        f"n^{size_slope.mean:.2f} at the same K (theory: -0.5, so that n learners need 1/n of the steps). The steps until a ring "
        f"is as good as full averaging, up to a factor 2, grow as the inverse gap to the power {gap_slope.mean:.2f} (theory: "
        "4, asymptotically, for unlike learners); where learners are much alike, a ring is never twice as bad.",
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
    def of(mixing: Mixing, K: int) -> list[float]:
        return [predicted(_Quadratics.drawn(mixing.size, seed), mixing.matrix(), K) for seed in seeds]

    ylabel = "mean squared gradient"
    return [
        Panel(
            "16 learners",
            "steps K",
            ylabel,
            [
                Line("fixed ring, measured", MEASURED, in_steps),
                Line(
                    "fixed ring, predicted",
                    STEPS,
                    list(zip(*(of(ring(16), K) for K in STEPS), strict=True)),
                    dashed=True,
                    beside="fixed ring, measured",
                ),
                Line(
                    "full averaging, predicted",
                    STEPS,
                    list(zip(*(of(complete(16), K) for K in STEPS), strict=True)),
                    dashed=True,
                ),
            ],
            log="xy",
        ),
        Panel(
            f"K = {STEPS[-2]} steps, full averaging",
            "learners n",
            ylabel,
            [
                Line("measured", SIZES, in_size),
                Line(
                    "predicted",
                    SIZES,
                    list(zip(*(of(complete(n), STEPS[-2]) for n in SIZES), strict=True)),
                    dashed=True,
                    beside="measured",
                ),
            ],
            log="xy",
        ),
        Panel(
            "until a ring is as good as full averaging",
            "1 / spectral gap",
            "steps K",
            [Line("exact, 16 learners", [1 / gap for gap in gaps], transients)],
            log="xy",
        ),
    ]


CLAIM = Claim(
    name="rate",
    sentence="The convergence rate is O(1/sqrt(K)) with linear speed-up in n, after a transient that grows with the inverse gap.",
    setting="quadratics with a different curvature and minimum at every learner and known gradient noise, step size "
    f"{STEP} sqrt(n/K); the exact prediction beside runs of the recursion in {COPIES} independent coordinates",
    differs="the papers prove a bound for smooth non-convex losses and show no experiment on constants that are known",
    experiment=experiment,
)
