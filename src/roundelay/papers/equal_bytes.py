"""Claim 6: what a byte buys on random rings, random matchings, one-peer exponential and base graphs, and by full averaging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from roundelay.papers.claim import Claim, Finding, Interval, Line, Panel, Progress, judged
from roundelay.simulation.problems import digits, loss
from roundelay.simulation.stacked import StackedLearners
from roundelay.strategies import DPSGD
from roundelay.topology import Mixing, base_graph, complete, one_peer_exponential, random_matching, random_ring, ring

LEARNERS, BATCH, LR, STEPS, LOOK_EVERY = 64, 4, 0.2, 400, 20
ALIKE = 1.05


class Sometimes(Mixing):
    """Another mixing in every `every`-th round, and none in between.

    >>> halved = Sometimes(ring(4), every=2)
    >>> halved.neighbours(0, round=0), halved.neighbours(0, round=1)
    ((1, 3), ())
    """

    def __init__(self, mixing: Mixing, every: int) -> None:
        period = None if mixing.period is None else mixing.period * every
        super().__init__(f"{mixing.name} every {every} steps", mixing.size, period)
        self._mixing, self._every = mixing, every

    def row(self, rank: int, round: int = 0) -> dict[int, float]:
        """That of the mixing, or of the identity."""
        number, resting = divmod(round, self._every)
        return {rank: 1.0} if resting else self._mixing.row(rank, number)


# Each sends one model per learner and step: a ring two in every second step, full averaging 2 (n-1)/n by a ring allreduce.
RIVALS: dict[str, Callable[[int], Mixing]] = {
    "random ring, every 2nd step": lambda seed: Sometimes(random_ring(LEARNERS, seed), 2),
    "random matching": lambda seed: random_matching(LEARNERS, seed),
    "one-peer exponential": lambda seed: one_peer_exponential(LEARNERS),
    "base graph": lambda seed: base_graph(LEARNERS, 1),
    "full averaging, every 2nd step": lambda seed: Sometimes(complete(LEARNERS), 2),
    "fixed ring, every 2nd step": lambda seed: Sometimes(ring(LEARNERS), 2),
}
OURS = "random ring, every 2nd step"
AT_EQUAL_BYTES = [name for name in RIVALS if name not in (OURS, "fixed ring, every 2nd step")]


@dataclass
class _Curve:
    losses: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)


def _train(mixing: Mixing, seed: int) -> _Curve:
    problem, curve = digits(), _Curve()
    shards = problem.shards(LEARNERS, seed)
    learners = StackedLearners(
        problem.module(seed),
        loss,
        lambda weights: torch.optim.SGD(weights, lr=LR, momentum=0.9),
        DPSGD(mixing),
        LEARNERS,
    )
    for step in range(STEPS):
        learners.step(shards.batch(step, BATCH))
        if (step + 1) % LOOK_EVERY == 0:
            curve.losses.append(learners.consensus_loss(problem.train))
            curve.spreads.append(learners.spread())
    return curve


def experiment(seeds: Sequence[int], progress: Progress) -> Finding:
    """Train with every rival at one model per learner and step."""
    curves: dict[str, list[_Curve]] = {name: [] for name in RIVALS}
    for done, seed in enumerate(seeds):
        for name, mixing_of in RIVALS.items():
            curves[name].append(_train(mixing_of(seed), seed))
        progress((done + 1) / len(seeds))
    finals = {name: [curve.losses[-1] for curve in of] for name, of in curves.items()}
    spreads = {name: [curve.spreads[-1] for curve in of] for name, of in curves.items()}
    figures: dict[str, Interval | float | str] = {}
    for name in RIVALS:
        figures[f"loss {name}"] = Interval.of(finals[name])
        figures[f"spread {name}"] = Interval.of(spreads[name])
    ratios = {
        name: Interval.of_ratios([ours / its for ours, its in zip(finals[OURS], finals[name], strict=True)])
        for name in AT_EQUAL_BYTES
    }
    figures.update({f"random ring's loss / {name}'s": ratio for name, ratio in ratios.items()})
    best = max(ratios, key=lambda name: ratios[name].mean)
    return Finding(
        judged(holds=all(ratio.high <= ALIKE for ratio in ratios.values()), fails=ratios[best].low > ALIKE),
        f"At one model sent per learner and step the random ring's consensus loss is {ratios[best]} times that of {best}, "
        "the best rival: " + ", ".join(f"{name} {sum(v) / len(v):.3f}" for name, v in finals.items()) + ".",
        figures,
        _panels(curves),
    )


def _panels(curves: dict[str, list[_Curve]]) -> list[Panel]:
    sent = list(range(LOOK_EVERY, STEPS + 1, LOOK_EVERY))
    xlabel = "models sent per learner"
    return [
        Panel(
            f"{LEARNERS} learners",
            xlabel,
            "consensus loss",
            [Line(name, sent, [curve.losses for curve in of]) for name, of in curves.items()],
            log="y",
        ),
        Panel(
            "replicas",
            xlabel,
            "spread",
            [Line(name, sent, [curve.spreads for curve in of]) for name, of in curves.items()],
            log="y",
        ),
    ]


CLAIM = Claim(
    name="equal-bytes",
    sentence="At equal bytes the randomised ring is as good as matchings, exponential and base graphs and full averaging.",
    setting=f"digits, MLP 64-32-10, {LEARNERS} learners x {BATCH} samples, lr {LR}, momentum 0.9, static shards, {STEPS} steps, "
    "one model sent per learner and step: what needs two is done every second step",
    differs="the papers compare the random ring with the fixed ring and with allreduce only, and not at equal bytes",
    experiment=experiment,
)
