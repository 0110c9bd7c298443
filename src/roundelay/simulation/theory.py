r"""Theory beside experiment: the real strategies on quadratics, next to what the topology package predicts.

The model is $X_{k+1} = W_k X_k - \alpha g(\Phi_k)$ with curvature h and gradient noise of variance $\sigma^2$:

* stationary spread of noise alone (h = 0): `stationary_variance` of the mixing, for DPSGD; for ADPSGD see `exchanged_at_once`
  and `exchanged_at_random`: a slow link makes exchanges rare and their content stale, and `max_lead` bounds how rare;
* stability: $\alpha h < (1 + \lambda_{\min})(1 + \beta)$;
* staleness: a gradient of $\tau$ steps ago is stable for $\alpha h < 2 \sin\frac{\pi}{2(2\tau + 1)}$: 2 for allreduce,
  1 for delay-by-one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from roundelay.clock import VirtualClock
from roundelay.papers.claim import Line, Panel
from roundelay.simulation import logistic
from roundelay.simulation.learners import VirtualLearner
from roundelay.simulation.network import Links, ModelledNetwork
from roundelay.simulation.stacked import StackedLearners
from roundelay.strategies import ADPSGD, DPSGD, DelayByOne, Strategy
from roundelay.topology import Mixing, complete, random_ring, ring, spectrum, stability_bound

SIZES = (4, 8, 16, 32)
RINGS: dict[str, Callable[[int], Mixing]] = {"fixed ring": ring, "random ring": random_ring}
GROWN = 1e3  # a run that has grown so much is unstable, one that has shrunk so much is stable


def delay_bound(delay: int) -> float:
    """Largest stable alpha h of x <- x - alpha h x_{k - delay}.

    >>> [round(delay_bound(delay), 3) for delay in range(3)]
    [2.0, 1.0, 0.618]
    """
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def exchanged_at_once(size: int) -> float:
    r"""Stationary variance, in $(\alpha\sigma)^2$, if every step is followed at once by an average with a random other.

    With S the sum of squared distances from consensus, a step adds $1 - 1/n$ and the average of i, whose noise is fresh, with j
    takes $\tfrac12 E|x_i - x_j|^2 = \frac{S}{n-1} + \tfrac12$; they balance at $S/n = \frac{n-1}{n}(\tfrac12 - \tfrac1n)$.
    """
    return (size - 1) / size * (1 / 2 - 1 / size)


def exchanged_at_random(size: int, exchanges_per_step: float) -> float:
    r"""The same if averages of random pairs, e per learner and step, come at random times and take none: $(\frac{n-1}{n})^2 / e$.

    What is exchanged over a slow link is old when it arrives, which this leaves out: it is what staleness is compared with.
    """
    return ((size - 1) / size) ** 2 / exchanges_per_step


def dpsgd_variance(mixing: Mixing, dimensions: int, rounds: int, seed: int) -> float:
    """Measured: mean squared distance from consensus in one dimension, for alpha = sigma = 1 and no curvature."""
    rng = np.random.default_rng(seed)
    X, total, begin = np.zeros((mixing.size, dimensions)), 0.0, rounds // 2
    for round in range(rounds):
        X = mixing.apply(X, round) - rng.standard_normal(X.shape)
        if round >= begin:
            total += float((X - X.mean(axis=0)).var(axis=0).mean())
    return total / (rounds - begin)


def adpsgd_variance(
    mixing: Mixing, dimensions: int, steps: int, seed: int, *, exchange_s: float = 0.1, max_lead: int = 16
) -> tuple[float, float]:
    """Measured with the strategy itself on the clock: the variance as above, and exchanges per step.

    A step takes between 0.9 and 1.1 s, a learner's own for good, so that learners drift through each other's phases.
    """
    clock = VirtualClock()
    network = ModelledNetwork(clock, mixing.size, Links(latency_s=exchange_s / 2))
    generator = torch.Generator().manual_seed(seed)
    paces = np.random.default_rng(seed).uniform(0.9, 1.1, mixing.size)
    strategies = [ADPSGD(mixing, max_lead) for _ in range(mixing.size)]
    for rank, strategy in enumerate(strategies):
        module = nn.Linear(dimensions, 1, bias=False).double()
        nn.init.zeros_(module.weight)

        def gradient(step: int, module: nn.Linear = module) -> None:
            module.weight.grad = torch.randn(module.weight.shape, generator=generator, dtype=torch.float64)

        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        pace = float(paces[rank])
        learner = VirtualLearner(
            module,
            optimizer,
            strategy,
            network.transports[rank],
            gradient,
            lambda step, pace=pace: pace,  # type: ignore[misc]
        )
        clock.spawn(learner.process(itertools.count()), f"learner {rank}")
    begin, variances = steps // 3, []
    for second in range(steps):
        clock.run(until=float(second) + 0.5)
        if second >= begin:
            X = torch.stack([strategy.weights().parts[0] for strategy in strategies])
            variances.append(float((X - X.mean(dim=0)).square().mean()))
    rates = [strategy.metrics()["exchanges_per_step"] for strategy in strategies]
    return float(np.mean(variances)), float(np.mean(rates))


def is_stable(strategy: Strategy, size: int, step: float, momentum: float, rounds: int = 250) -> bool:
    """Whether a strategy of the synchronous family dies out on curvature 1 at alpha = `step`, from random weights.

    Where only gradients are averaged the weights are equal at first, for they would stay unequal for ever.
    """
    learners = StackedLearners(
        nn.Linear(1, 1, bias=False).double(),
        lambda module, _: 0.5 * next(module.parameters()).square().sum(),
        lambda weights: torch.optim.SGD(weights, lr=step, momentum=momentum),
        strategy,
        size,
    )
    weight = next(iter(learners.weights.values()))
    with torch.no_grad():
        start = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        weight.copy_(start if learners.mixes else start[:1].expand_as(start))
    for _ in range(rounds):
        learners.step(torch.zeros(size, 1))
        largest = float(weight.detach().abs().max())
        if largest > GROWN:
            return False
    return largest < 1.0


def measured_bound(strategy_of: Callable[[], Strategy], size: int, momentum: float, *, highest: float = 4.5) -> float:
    """The largest stable alpha h of a strategy, by bisection to about one per cent."""
    low, high = 0.0, highest
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable(strategy_of(), size, middle, momentum) else (low, middle)
    return (low + high) / 2


def panels(seeds: Sequence[int]) -> list[Panel]:
    """Measured and predicted side by side: spread, stability, what slow links and max_lead do, and spread on a real loss."""
    return [_spread_panel(seeds), _stability_panel(), _links_panel(seeds), _logistic_panel(seeds)]


def _pair(name: str, x: Sequence[float], measured: Sequence[Sequence[float]], predicted: Sequence[float]) -> list[Line]:
    """A line and, dashed beside it, its prediction."""
    label = f"{name}, measured"
    return [Line(label, x, measured), Line(f"{name}, predicted", x, [predicted], dashed=True, beside=label)]


def _spread_panel(seeds: Sequence[int]) -> Panel:
    lines = []
    for name, of in RINGS.items():
        found = [[dpsgd_variance(of(n), 100, 30 * n + 100, seed) for n in SIZES] for seed in seeds]
        lines += _pair(name, SIZES, found, [spectrum(of(n)).stationary_variance or math.nan for n in SIZES])
    return Panel("stationary spread of dpsgd", "learners", "variance in (ασ)²", lines, "xy")


def _stability_panel() -> Panel:
    momenta, lines = (0.0, 0.3, 0.6, 0.9), []
    strategies: dict[str, tuple[Callable[[], Strategy], Mixing]] = {
        "dpsgd ring": (lambda: DPSGD(ring(8)), ring(8)),
        "delay-by-one": (DelayByOne, complete(8)),
    }
    for name, (strategy_of, mixing) in strategies.items():
        found = [measured_bound(strategy_of, 8, momentum) for momentum in momenta]
        lines += _pair(name, momenta, [found], [stability_bound(mixing, momentum) for momentum in momenta])
    return Panel("stability, 8 learners", "momentum", "largest stable lr × curvature", lines)


def _links_panel(seeds: Sequence[int]) -> Panel:
    exchanges_s, lines = (0.1, 1.0, 2.0, 4.0, 8.0), []
    for lead in (16, 2):
        runs = [
            [adpsgd_variance(random_ring(8, seed), 50, 80, seed, exchange_s=s, max_lead=lead) for s in exchanges_s]
            for seed in seeds
        ]
        rates = np.mean([[rate for _, rate in row] for row in runs], axis=0)
        label = f"max_lead {lead}, measured"
        fresh = [exchanged_at_random(8, rate) for rate in rates]
        lines += [
            Line(label, exchanges_s, [[variance for variance, _ in row] for row in runs]),
            Line(f"max_lead {lead}, without staleness", exchanges_s, [fresh], dashed=True, beside=label),
        ]
    return Panel("adpsgd on 8 learners, random ring", "an exchange takes, in steps", "variance in (ασ)²", lines, "xy")


def _logistic_panel(seeds: Sequence[int]) -> Panel:
    lines = []
    for name, of in RINGS.items():
        found = [[logistic.dpsgd_spread(of(n), 20 * n + 100, seed) for n in SIZES] for seed in seeds]
        lines += _pair(f"dpsgd, {name}", SIZES, found, [logistic.predicted(of(n)) for n in SIZES])
    found = [[logistic.adpsgd_spread(random_ring(n, seed), 60, seed) for n in SIZES] for seed in seeds]
    lines += _pair("adpsgd, random ring", SIZES, found, [exchanged_at_once(n) for n in SIZES])
    return Panel("logistic regression on digits", "learners", "variance in (ασ)²", lines, "xy")
