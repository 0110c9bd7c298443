"""Claim 6: at equal bytes the randomised ring is as good as other sparse graphs and as full averaging.

Setting: 64 learners on handwritten digits. Every learner sends one model per step on average, so a graph that needs
two models per round mixes in every second step only. Rivals are random matchings, the one-peer exponential graph, the
base graph and full averaging.

Figures: consensus loss and spread at the end; the loss of the random ring divided by the loss of each rival, seed by
seed.

Verdict: reproduced if the random ring's loss is at most 1.05 times that of every rival, with 95 % confidence. Not
reproduced if the random ring's loss is more than 1.05 times that of the best rival, with 95 % confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roundelay.papers.claim import Claim, Figures, Finding, Interval, Line, Panel, Progress, verdict_from
from roundelay.papers.runs import synchronous_run
from roundelay.simulation.problems import digits
from roundelay.simulation.stacked import StackedDPSGD
from roundelay.topology import Mixing, base_graph, complete, one_peer_exponential, random_matching, random_ring, ring

LEARNERS, BATCH, LR, STEPS, LOOK_EVERY = 64, 4, 0.2, 400, 20
ALIKE = 1.05  # a loss ratio up to this counts as "as good as"


class Sometimes(Mixing):
    """A mixing that applies another mixing in every `every`-th round, and none in the rounds between.

    >>> halved = Sometimes(ring(4), every=2)
    >>> halved.neighbours(0, round=0), halved.neighbours(0, round=1)
    ((1, 3), ())
    """

    def __init__(self, mixing: Mixing, every: int) -> None:
        period = None if mixing.period is None else mixing.period * every
        super().__init__(f"{mixing.name} every {every} steps", mixing.size, period)
        self._mixing, self._every = mixing, every

    def row(self, rank: int, round: int = 0) -> dict[int, float]:
        """A row of the other mixing, or of the identity matrix in a round without mixing."""
        number, resting = divmod(round, self._every)
        return {rank: 1.0} if resting else self._mixing.row(rank, number)


# Every entry sends one model per learner and step. A ring sends two models in every second step. So does full averaging
# by a ring allreduce, up to a factor (n-1)/n.
RIVALS: dict[str, Callable[[int], Mixing]] = {
    "random ring, every 2nd step": lambda seed: Sometimes(random_ring(LEARNERS, seed), 2),
    "random matching": lambda seed: random_matching(LEARNERS, seed),
    "one-peer exponential": lambda seed: one_peer_exponential(LEARNERS),
    "base graph": lambda seed: base_graph(LEARNERS, 1),
    "full averaging, every 2nd step": lambda seed: Sometimes(complete(LEARNERS), 2),
    "fixed ring, every 2nd step": lambda seed: Sometimes(ring(LEARNERS), 2),
}
OURS = "random ring, every 2nd step"
COMPARED = [name for name in RIVALS if name not in (OURS, "fixed ring, every 2nd step")]


@dataclass
class _Curve:
    losses: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)


def _train(mixing: Mixing, seed: int) -> _Curve:
    problem, curve = digits(), _Curve()
    run = synchronous_run(problem, StackedDPSGD(mixing), LEARNERS, batch=BATCH, seed=seed, lr=lambda step: LR)
    for step, learners in zip(range(STEPS + 1), run, strict=False):
        if step and step % LOOK_EVERY == 0:
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
    figures: Figures = {}
    for name, of in curves.items():
        figures[f"loss {name}"] = Interval.of(finals[name])
        figures[f"spread {name}"] = Interval.of([curve.spreads[-1] for curve in of])
    ratios = {
        name: Interval.of_ratios([ours / theirs for ours, theirs in zip(finals[OURS], finals[name], strict=True)])
        for name in COMPARED
    }
    figures.update({f"random ring's loss / {name}'s": ratio for name, ratio in ratios.items()})
    best = max(ratios, key=lambda name: ratios[name].mean)
    return Finding(
        verdict_from(holds=all(ratio.high <= ALIKE for ratio in ratios.values()), fails=ratios[best].low > ALIKE),
        f"At one model sent per learner and step the random ring's consensus loss is {ratios[best]} times that of {best}, "
        "the best rival: " + ", ".join(f"{name} {sum(v) / len(v):.3f}" for name, v in finals.items()) + ".",
        figures,
        _panels(curves),
    )


def _panels(curves: dict[str, list[_Curve]]) -> list[Panel]:
    sent = list(range(LOOK_EVERY, STEPS + 1, LOOK_EVERY))
    losses = [Line(name, sent, [curve.losses for curve in of]) for name, of in curves.items()]
    spreads = [Line(name, sent, [curve.spreads for curve in of]) for name, of in curves.items()]
    return [
        Panel(f"{LEARNERS} learners", "models sent per learner", "consensus loss", losses, log="y"),
        Panel("replicas", "models sent per learner", "spread", spreads, log="y"),
    ]


CLAIM = Claim(
    name="equal-bytes",
    sentence="At equal bytes the randomised ring is as good as matchings, exponential and base graphs and full averaging.",
    setting=f"digits, MLP 64-32-10, {LEARNERS} learners x {BATCH} samples, lr {LR}, momentum 0.9, static shards, {STEPS} steps, "
    "one model sent per learner and step: a graph that needs two models per round mixes only in every second step",
    differs="the papers compare the random ring with the fixed ring and with allreduce only, and not at equal bytes",
    seed_s=8.4,
    experiment=experiment,
    check=digits,
)
