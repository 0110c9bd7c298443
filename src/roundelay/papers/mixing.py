"""Claim 1: randomised mixing restores the spectral gap, and with it convergence, for many learners (arXiv:2002.01119).

Setting: DPSGD on handwritten digits, on the fixed ring and on a ring that is drawn anew in each round. There are 64
learners. The two controls are 4 learners, and 64 learners without momentum.

Figures: consensus loss and spread of the fixed ring, divided by those of the random ring, seed by seed.

Verdict: reproduced if, with 64 learners and on every seed, the loss ratio is at least 1.8 and the spread ratio at
least 5. Not reproduced if the 95 % interval of the loss ratio lies below 1.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roundelay.papers.claim import Claim, Figures, Finding, Interval, Line, Panel, Progress, verdict_from
from roundelay.papers.runs import synchronous_run
from roundelay.simulation.problems import digits
from roundelay.simulation.stacked import StackedDPSGD
from roundelay.topology import Mixing, random_ring, ring, spectral_gap

BATCH, LR, STEPS, LOOK_EVERY = 4, 0.2, 500, 20
MANY, FEW = 64, 4
LOSS_RATIO, SPREAD_RATIO = 1.8, 5.0  # what "restores" means here, on every seed
SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass
class _Curve:
    losses: list[float]
    spread: float


def _train(mixing: Mixing, momentum: float, seed: int) -> _Curve:
    problem, curve = digits(), _Curve([], 0.0)
    run = synchronous_run(
        problem, StackedDPSGD(mixing), mixing.size, batch=BATCH, seed=seed, lr=lambda step: LR, momentum=momentum
    )
    for step, learners in zip(range(STEPS + 1), run, strict=False):
        if step % LOOK_EVERY == 0:
            curve.losses.append(learners.consensus_loss(problem.train))
            curve.spread = learners.spread()
    return curve


def experiment(seeds: Sequence[int], progress: Progress) -> Finding:
    """Train on both rings: many learners, few learners, and many learners without momentum."""
    settings = {"many": (MANY, 0.9), "few": (FEW, 0.9), "no_momentum": (MANY, 0.0)}
    curves: dict[tuple[str, str], list[_Curve]] = {}
    for done, seed in enumerate(seeds):
        for name, (size, momentum) in settings.items():
            curves.setdefault((name, "ring"), []).append(_train(ring(size), momentum, seed))
            curves.setdefault((name, "random-ring"), []).append(_train(random_ring(size, seed), momentum, seed))
        progress((done + 1) / len(seeds))
    loss_ratios = {name: _ratios(curves, name, lambda curve: curve.losses[-1]) for name in settings}
    spread_ratios = {name: _ratios(curves, name, lambda curve: curve.spread) for name in settings}
    figures: Figures = {
        "gap_ring_64": spectral_gap(ring(MANY)),
        "gap_random_ring_64": spectral_gap(random_ring(MANY)),
        "smallest_loss_ratio": min(loss_ratios["many"]),
        "smallest_spread_ratio": min(spread_ratios["many"]),
    }
    for name in settings:
        figures[f"loss_ratio_{name}"] = Interval.of_ratios(loss_ratios[name])
        figures[f"spread_ratio_{name}"] = Interval.of_ratios(spread_ratios[name])
    holds = min(loss_ratios["many"]) >= LOSS_RATIO and min(spread_ratios["many"]) >= SPREAD_RATIO
    many, few, calm = (Interval.of_ratios(loss_ratios[name]) for name in ("many", "few", "no_momentum"))
    return Finding(
        verdict_from(holds=holds, fails=many.high < LOSS_RATIO),
        f"With {MANY} learners the fixed ring's consensus loss is {many} times the random ring's "
        f"and its spread {Interval.of_ratios(spread_ratios['many'])} times. With {FEW} learners the loss ratio is "
        f"{few}; with {MANY} learners but without momentum it is {calm}: "
        "the gap matters when there are many learners and large steps.",
        figures,
        _panels(curves),
    )


def _ratios(curves: dict[tuple[str, str], list[_Curve]], name: str, figure: Callable[[_Curve], float]) -> list[float]:
    pairs = zip(curves[name, "ring"], curves[name, "random-ring"], strict=True)
    return [figure(fixed) / figure(randomised) for fixed, randomised in pairs]


def _panels(curves: dict[tuple[str, str], list[_Curve]]) -> list[Panel]:
    gaps = [
        Line("fixed ring", SIZES, [[spectral_gap(ring(n)) for n in SIZES]]),
        Line("random ring", SIZES, [[spectral_gap(random_ring(n)) for n in SIZES]]),
    ]
    panels = [Panel("spectral gap, closed form", "learners", "gap", gaps, log="xy")]
    steps = list(range(0, STEPS + 1, LOOK_EVERY))
    titles = {"many": f"{MANY} learners", "few": f"{FEW} learners", "no_momentum": f"{MANY} learners, no momentum"}
    for name, title in titles.items():
        lines = [
            Line(label, steps, [curve.losses for curve in curves[name, topology]])
            for topology, label in (("ring", "fixed ring"), ("random-ring", "random ring"))
        ]
        panels.append(Panel(title, "steps", "consensus loss", lines, log="y"))
    return panels


CLAIM = Claim(
    name="mixing",
    sentence="Randomised mixing restores the spectral gap, and with it convergence, when there are many learners.",
    setting=f"digits, MLP 64-32-10, {MANY} learners x {BATCH} samples, lr {LR}, momentum 0.9, static shards, {STEPS} steps; "
    f"controls: {FEW} learners, and no momentum",
    differs="a 2,410-parameter MLP on 1,497 digits instead of a 43 M-parameter LSTM on 2,000 hours of speech",
    seed_s=9.5,
    experiment=experiment,
    check=digits,
)
