"""Claim 3: ADPSGD copes with slow learners, on fixed and random rings; allreduce and delay-by-one stall (arXiv:2110.11199).

Setting: 16 and 64 learners on handwritten digits; learner 0 is 1, 2, 10 or 100 times slower. An exchange takes a
tenth of a step.

Figures: virtual time to a consensus loss of 0.5, divided by the time without a slow learner, seed by seed. One more
figure shows the limit of ADPSGD: the accuracy on two digits whose images only the slow learner has.

Verdict, with learner 0 100 times slower: reproduced if ADPSGD takes at most 2 times as long, on both rings, both
sizes and every seed, and the synchronous strategies at least 50 times as long. Not reproduced if ADPSGD takes more
than 50 times as long somewhere, or a synchronous strategy less than twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from roundelay.papers.claim import Claim, Figures, Finding, Interval, Line, Panel, Progress, verdict_from
from roundelay.papers.runs import AsynchronousRun, accuracy, first_below, synchronous_run
from roundelay.simulation.learners import seconds_per_step
from roundelay.simulation.network import Links
from roundelay.simulation.problems import Problem, Shards, digits
from roundelay.simulation.stacked import StackedAllreduce, StackedDelayByOne, StackedStrategy
from roundelay.strategies import Allreduce, DelayByOne, Strategy
from roundelay.topology import Mixing, random_ring, ring

BATCH, LR, TARGET = 8, 0.1, 0.5
SIZES, FACTORS = (16, 64), (1.0, 2.0, 10.0, 100.0)
LINKS, MODEL_BYTES = Links(bandwidth_Bps=1.0), 0.05  # in steps: an exchange, a model each way, takes a tenth of a step
PATIENCE_STEPS = 150  # a run gives up after the time of so many usual steps; the limit is measured then too
RARE = (8, 9)  # the digits that only the slow learner has, in the experiment on the limit
COPES = 2.0  # "copes": with one learner 100 times slower the target takes at most twice as long
ASYNCHRONOUS: dict[str, Callable[[int, int], Mixing]] = {
    "adpsgd ring": lambda size, seed: ring(size),
    "adpsgd random-ring": random_ring,
}
SYNCHRONOUS: dict[str, tuple[Callable[[], StackedStrategy], Callable[[], Strategy]]] = {
    "allreduce": (StackedAllreduce, Allreduce),
    "delay-by-one": (StackedDelayByOne, DelayByOne),
}


def _compute_s(size: int, factor: float) -> list[float]:
    """Seconds of a step by learner; learner 0 is the slow one."""
    return [factor, *[1.0] * (size - 1)]


def _synchronous_steps(strategy: StackedStrategy, size: int, seed: int) -> float:
    """Steps to the target. The number does not depend on how slow a learner is; the time per step does."""
    problem, losses = digits(), list[float]()
    run = synchronous_run(problem, strategy, size, batch=BATCH, seed=seed, lr=lambda step: LR)
    for _, learners in zip(range(PATIENCE_STEPS), run, strict=False):
        losses.append(learners.consensus_loss(problem.train))
        if losses[-1] <= TARGET:
            break
    return first_below(range(len(losses)), losses, TARGET)


def _asynchronous(shards: Shards, mixing: Mixing, factor: float, seed: int) -> AsynchronousRun:
    compute_s = _compute_s(mixing.size, factor)
    return AsynchronousRun(digits(), shards, mixing, BATCH, lambda samples: LR, compute_s, seed, LINKS, MODEL_BYTES)


def _seconds_to_target(mixing: Mixing, factor: float, seed: int) -> float:
    """Virtual seconds that asynchronous learners take to the target."""
    seconds, losses = [], []
    run = _asynchronous(digits().shards(mixing.size, seed), mixing, factor, seed)
    for _, model in zip(range(PATIENCE_STEPS + 1), run.mean_models(), strict=False):
        seconds.append(model.seconds)
        losses.append(model.loss)
        if model.loss <= TARGET:
            break
    return first_below(seconds, losses, TARGET)


def _uneven_shards(problem: Problem, learners: int, seed: int) -> Shards:
    """Only learner 0 has images of the rare digits; the other learners share all other images."""
    _, y = problem.train
    rare = torch.isin(y, torch.tensor(RARE))
    common = torch.nonzero(~rare).flatten()
    order = common[torch.randperm(len(common), generator=torch.Generator().manual_seed(seed))]
    size = len(order) // (learners - 1)
    own = torch.nonzero(rare).flatten()[:size]
    own = own.repeat(-(-size // len(own)))[:size]
    return Shards(problem.train, torch.cat([own[None], order[: size * (learners - 1)].view(learners - 1, size)]), seed)


def _rare_accuracy(factor: float, seed: int) -> float:
    """Held-out accuracy on the rare digits, after the time of PATIENCE_STEPS usual steps."""
    problem, size = digits(), SIZES[0]
    run = _asynchronous(_uneven_shards(problem, size, seed), random_ring(size, seed), factor, seed)
    *_, last = (model for _, model in zip(range(PATIENCE_STEPS + 1), run.mean_models(), strict=False))
    x, y = problem.held_out
    rare = torch.isin(y, torch.tensor(RARE))
    return accuracy(problem.module(0), last.weights, (x[rare], y[rare]))


def experiment(seeds: Sequence[int], progress: Progress) -> Finding:
    """Train with every strategy, size and slowness; then find the limit."""
    seconds: dict[tuple[str, int], list[list[float]]] = {}  # by strategy and size: a row per seed, an entry per factor
    rare: dict[float, list[float]] = {factor: [] for factor in FACTORS}
    step_s = {
        (name, size): [seconds_per_step(strategy_of, LINKS, MODEL_BYTES, _compute_s(size, f)) for f in FACTORS]
        for name, (_, strategy_of) in SYNCHRONOUS.items()
        for size in SIZES
    }
    for done, seed in enumerate(seeds):
        for at, size in enumerate(SIZES, start=1):
            for name, (stacked_of, _) in SYNCHRONOUS.items():
                steps = _synchronous_steps(stacked_of(), size, seed)
                seconds.setdefault((name, size), []).append([steps * of for of in step_s[name, size]])
            for name, mixing_of in ASYNCHRONOUS.items():
                times = [_seconds_to_target(mixing_of(size, seed), factor, seed) for factor in FACTORS]
                seconds.setdefault((name, size), []).append(times)
            progress((done + at / (len(SIZES) + 1)) / len(seeds))
        for factor in FACTORS:
            rare[factor].append(_rare_accuracy(factor, seed))
        progress((done + 1) / len(seeds))
    return _finding(seconds, rare)


def _finding(seconds: dict[tuple[str, int], list[list[float]]], rare: dict[float, list[float]]) -> Finding:
    figures: Figures = {}
    worst: dict[str, list[float]] = {}
    for (name, size), rows in seconds.items():
        for at, factor in enumerate(FACTORS[1:], start=1):
            longer = [row[at] / row[0] for row in rows]
            figures[f"{name} {size} learners, {factor:g}x"] = Interval.of_ratios(longer)
            if factor == FACTORS[-1]:
                worst.setdefault(name, []).extend(longer)
    for factor, accuracies in rare.items():
        figures[f"accuracy on the straggler's own classes, {factor:g}x"] = Interval.of(accuracies)
    cope = max(max(worst[name]) for name in ASYNCHRONOUS)
    stall = min(min(worst[name]) for name in SYNCHRONOUS)
    return Finding(
        verdict_from(holds=cope <= COPES and stall >= FACTORS[-1] / 2, fails=cope > FACTORS[-1] / 2 or stall < COPES),
        f"With one learner 100 times slower ADPSGD takes at most {cope:.2f} times as long to loss {TARGET} (every seed, both "
        f"rings, {SIZES[0]} and {SIZES[1]} learners); allreduce and delay-by-one take at least {stall:.0f} times as long. The "
        f"limit: if the straggler alone holds the digits {RARE[0]} and {RARE[1]}, the mean model gets "
        f"{100 * sum(rare[1.0]) / len(rare[1.0]):.0f} % of them right when the straggler is as fast as the others and "
        f"{100 * sum(rare[100.0]) / len(rare[100.0]):.0f} % when the straggler is 100 times slower, after the same time.",
        figures,
        _panels(seconds, rare),
    )


def _panels(seconds: dict[tuple[str, int], list[list[float]]], rare: dict[float, list[float]]) -> list[Panel]:
    panels = [
        Panel(
            f"{size} learners",
            "how many times slower learner 0 is",
            f"virtual time to loss {TARGET}, in steps",
            [Line(name, FACTORS, rows) for (name, of), rows in seconds.items() if of == size],
            log="xy",
        )
        for size in SIZES
    ]
    limit = Line("adpsgd random-ring", FACTORS, list(map(list, zip(*rare.values(), strict=True))))
    return [
        *panels,
        Panel(
            "only the straggler has 8s and 9s",
            "how many times slower learner 0 is",
            "accuracy on 8s and 9s",
            [limit],
            "x",
        ),
    ]


CLAIM = Claim(
    name="stragglers",
    sentence="ADPSGD on fixed and random rings copes with slow learners; allreduce and delay-by-one stall.",
    setting=f"digits, MLP 64-32-10, 16 and 64 learners x {BATCH} samples, lr {LR}, momentum 0.9, one learner 2, 10 or 100 times "
    f"slower, virtual time to consensus training loss {TARGET}; the limit on 16 learners after {PATIENCE_STEPS} usual steps",
    differs="one slow learner among 16 or 64 on a virtual clock, where an exchange takes a tenth of a step; the paper slowed one "
    "of 16 GPUs that trained an LSTM on speech",
    seed_s=21,
    experiment=experiment,
    check=digits,
)
