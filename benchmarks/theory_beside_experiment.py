r"""The plot of docs/simulation.md: what theory predicts for spread and stability, beside runs of the strategies.

    python benchmarks/theory_beside_experiment.py out/theory.svg

The model is $X_{k+1} = W_k X_k - \alpha g(\Phi_k)$ with curvature h and gradient noise of variance $\sigma^2$:

* the stationary spread of DPSGD under noise alone (h = 0) is `stationary_variance` of the mixing;
* the spread of ADPSGD lies between `exchanged_at_once` and a multiple of `exchanged_at_random`: over a slow link exchanges are
  rare and their content is old, and `max_lead` bounds how rare they get;
* DPSGD is stable for $\alpha h < (1 + \lambda_{\min})(1 + \beta)$, delay-by-one for $\alpha h < 1 + \beta$.

tests/spec/test_simulated_theory.py holds these functions to tolerances from sampling error.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from roundelay.clock import VirtualClock
from roundelay.papers.claim import Line, Panel
from roundelay.reports.plots.reproduce import plot_panels
from roundelay.simulation import StackedLearners, VirtualLearner, start
from roundelay.simulation.network import Links, ModelledNetwork
from roundelay.simulation.stacked import StackedDelayByOne, StackedDPSGD, StackedStrategy
from roundelay.strategies import ADPSGD
from roundelay.strategies.pair_exchange import WEIGHT
from roundelay.topology import Mixing, complete, random_ring, ring, spectrum, stability_bound

SIZES = (4, 8, 16, 32)
RINGS: dict[str, Callable[[int], Mixing]] = {"fixed ring": ring, "random ring": random_ring}
GROWN = 1e3  # weights that have grown to this size are unstable


def exchanged_at_once(size: int) -> float:
    r"""Stationary variance, in $(\alpha\sigma)^2$, if every step is followed at once by an exchange with a random peer.

    With S the sum of squared distances from consensus, a step adds $1 - 1/n$. An exchange of i, whose noise is fresh, with j
    moves both ends by w of their difference and removes $2w(1-w) E|x_i - x_j|^2 = 2w(1-w)(\frac{2S}{n-1} + 1)$. They balance at
    $\frac Sn = \frac{n-1}{2n}(\frac{1 - 1/n}{2w(1-w)} - 1)$.
    """
    return (size - 1) / (2 * size) * ((1 - 1 / size) / (2 * WEIGHT * (1 - WEIGHT)) - 1)


def exchanged_at_random(size: int, exchanges_per_step: float) -> float:
    r"""Stationary variance if random pairs exchange at random times, e times per learner and step.

    It is $(\frac{n-1}{n})^2 / (4w(1-w)e)$. It leaves out that weights are old when they arrive over a slow link, so it is what
    staleness is compared with.
    """
    return ((size - 1) / size) ** 2 / (4 * WEIGHT * (1 - WEIGHT) * exchanges_per_step)


def dpsgd_variance(mixing: Mixing, dimensions: int, rounds: int, seed: int) -> float:
    """Measured mean squared distance from consensus per dimension, for alpha = sigma = 1 and no curvature."""
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
    """The same for ADPSGD itself on the virtual clock, and its exchanges per step.

    Each learner has its own step time between 0.9 and 1.1 s, so that learners drift through each other's phases.
    """
    clock = VirtualClock()
    network = ModelledNetwork(clock, mixing.size, Links(latency_s=exchange_s / 2))
    generator = torch.Generator().manual_seed(seed)
    compute_s = np.random.default_rng(seed).uniform(0.9, 1.1, mixing.size).tolist()
    strategies = [ADPSGD(mixing, max_lead) for _ in range(mixing.size)]
    learners = []
    for rank, strategy in enumerate(strategies):
        module = nn.Linear(dimensions, 1, bias=False).double()
        nn.init.zeros_(module.weight)

        def gradient(step: int, module: nn.Linear = module) -> None:
            module.weight.grad = torch.randn(module.weight.shape, generator=generator, dtype=torch.float64)

        def seconds(step: int, rank: int = rank) -> float:
            return compute_s[rank]

        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        learners.append(VirtualLearner(module, optimizer, strategy, network.transports[rank], gradient, seconds))
    start(clock, learners)
    begin, variances = steps // 3, []
    for second in range(steps):
        clock.run(until=second + 0.5)
        if second >= begin:
            X = torch.stack([strategy.weights().parts[0] for strategy in strategies])
            variances.append(float((X - X.mean(dim=0)).square().mean()))
    rates = [strategy.metrics()["exchanges_per_step"] for strategy in strategies]
    return float(np.mean(variances)), float(np.mean(rates))


def is_stable(strategy: StackedStrategy, size: int, step: float, momentum: float, rounds: int = 250) -> bool:
    """Whether random weights die out on curvature 1 at alpha = `step`."""
    learners = StackedLearners(
        nn.Linear(1, 1, bias=False).double(),
        lambda module, _: 0.5 * next(module.parameters()).square().sum(),
        lambda weights: torch.optim.SGD(weights, lr=step, momentum=momentum),
        strategy,
        size,
    )
    weight = next(iter(learners.weights.values()))
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    for _ in range(rounds):
        learners.step(torch.zeros(size, 1))
        largest = float(weight.detach().abs().max())
        if largest > GROWN:
            return False
    return largest < 1.0


def measured_bound(strategy_of: Callable[[], StackedStrategy], size: int, momentum: float) -> float:
    """The largest stable alpha h, by bisection to about one per cent."""
    low, high = 0.0, 4.5
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable(strategy_of(), size, middle, momentum) else (low, middle)
    return (low + high) / 2


def pair(name: str, x: Sequence[float], measured: Sequence[Sequence[float]], predicted: Sequence[float]) -> list[Line]:
    """A measured line and its prediction."""
    label = f"{name}, measured"
    return [Line(label, x, measured), Line(f"{name}, predicted", x, [predicted], dashed=True, beside=label)]


def spread_panel(seeds: Sequence[int]) -> Panel:
    lines = []
    for name, of in RINGS.items():
        found = [[dpsgd_variance(of(n), 100, 30 * n + 100, seed) for n in SIZES] for seed in seeds]
        lines += pair(name, SIZES, found, [spectrum(of(n)).stationary_variance or math.nan for n in SIZES])
    return Panel("stationary spread of dpsgd", "learners", "variance in (ασ)²", lines, "xy")


def stability_panel() -> Panel:
    momenta, lines = (0.0, 0.3, 0.6, 0.9), []
    strategies: dict[str, tuple[Callable[[], StackedStrategy], Mixing]] = {
        "dpsgd ring": (lambda: StackedDPSGD(ring(8)), ring(8)),
        "delay-by-one": (StackedDelayByOne, complete(8)),
    }
    for name, (strategy_of, mixing) in strategies.items():
        found = [measured_bound(strategy_of, 8, momentum) for momentum in momenta]
        lines += pair(name, momenta, [found], [stability_bound(mixing, momentum) for momentum in momenta])
    return Panel("stability, 8 learners", "momentum", "largest stable lr × curvature", lines)


def slow_links_panel(seeds: Sequence[int]) -> Panel:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    seeds = range(arguments.seeds)
    plot_panels([spread_panel(seeds), stability_panel(), slow_links_panel(seeds)], arguments.picture)


if __name__ == "__main__":
    main()
