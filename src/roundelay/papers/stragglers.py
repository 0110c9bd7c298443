"""Claim 3: ADPSGD copes with slow learners, on fixed and random rings; allreduce and delay-by-one stall (arXiv:2110.11199)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from roundelay.papers.asynchronous import AsynchronousRun, Curve, accuracy, first_below, pace
from roundelay.papers.claim import Claim, Finding, Interval, Line, Panel, Progress, judged
from roundelay.simulation.network import Links
from roundelay.simulation.problems import Problem, Shards, digits, loss
from roundelay.simulation.stacked import StackedLearners
from roundelay.strategies import Allreduce, DelayByOne, Strategy
from roundelay.topology import Mixing, random_ring, ring

BATCH, LR, TARGET = 8, 0.1, 0.5
SIZES, FACTORS = (16, 64), (1.0, 2.0, 10.0, 100.0)
LINKS, MODEL_BYTES = Links(bandwidth_Bps=1.0), 0.05  # in steps: an exchange, a model each way, takes a tenth of one
PATIENCE_S = 150.0
LIMIT_S = 150.0
RARE = (8, 9)  # the digits that only the straggler has, in the experiment on the limit
COPES = 2.0  # "copes": with one learner 100 times slower the target takes at most twice as long
ASYNCHRONOUS: dict[str, Callable[[int, int], Mixing]] = {
    "adpsgd ring": lambda size, seed: ring(size),
    "adpsgd random-ring": random_ring,
}
SYNCHRONOUS: dict[str, Callable[[], Strategy]] = {"allreduce": Allreduce, "delay-by-one": DelayByOne}


def _paces(size: int, factor: float) -> list[float]:
    """Seconds of a step by learner; learner 0 is the slow one."""
    return [factor, *[1.0] * (size - 1)]


def _synchronous_steps(strategy: Strategy, size: int, seed: int) -> float:
    """Steps to the target; how long each takes is the clock's business."""
    problem = digits()
    shards = problem.shards(size, seed)
    learners = StackedLearners(
        problem.module(seed), loss, lambda w: torch.optim.SGD(w, lr=LR, momentum=0.9), strategy, size
    )
    losses = [learners.consensus_loss(problem.train)]
    while losses[-1] > TARGET and len(losses) < PATIENCE_S:
        learners.step(shards.batch(len(losses), BATCH))
        losses.append(learners.consensus_loss(problem.train))
    return first_below(range(len(losses)), losses, TARGET)


def _asynchronous(
    mixing: Mixing, factor: float, seed: int, shards: Shards | None = None, until_s: float = PATIENCE_S
) -> Curve:
    problem = digits()
    return AsynchronousRun(
        problem,
        shards or problem.shards(mixing.size, seed),
        mixing,
        BATCH,
        lambda samples: LR,
        _paces(mixing.size, factor),
        seed,
        LINKS,
        MODEL_BYTES,
    ).curve(until_s, TARGET if shards is None else 0.0)


def _uneven_shards(problem: Problem, learners: int, seed: int) -> Shards:
    """The rare classes are learner 0's alone; the others share the rest."""
    _, y = problem.train
    rare = torch.isin(y, torch.tensor(RARE))
    common = torch.nonzero(~rare).flatten()
    order = common[torch.randperm(len(common), generator=torch.Generator().manual_seed(seed))]
    size = len(order) // (learners - 1)
    own = torch.nonzero(rare).flatten()[:size]
    own = own.repeat(-(-size // len(own)))[:size]
    return Shards(problem.train, torch.cat([own[None], order[: size * (learners - 1)].view(learners - 1, size)]), seed)


def _rare_accuracy(problem: Problem, curve: Curve) -> float:
    x, y = problem.held_out
    rare = torch.isin(y, torch.tensor(RARE))
    return accuracy(problem.module(0), curve.weights, (x[rare], y[rare]))


def experiment(seeds: Sequence[int], progress: Progress) -> Finding:
    """Time to a loss target for every strategy, size and slowness, and the limit where the straggler alone has some classes."""
    seconds: dict[tuple[str, int], list[list[float]]] = {}  # by strategy and size: one row a seed, one entry a factor
    rare: dict[float, list[float]] = {factor: [] for factor in FACTORS}
    waits = {
        (name, size): [pace(strategy_of, LINKS, MODEL_BYTES, _paces(size, factor)) for factor in FACTORS]
        for name, strategy_of in SYNCHRONOUS.items()
        for size in SIZES
    }
    for done, seed in enumerate(seeds):
        for size in SIZES:
            for name, strategy_of in SYNCHRONOUS.items():
                steps = _synchronous_steps(strategy_of(), size, seed)
                seconds.setdefault((name, size), []).append([steps * step_s for step_s in waits[name, size]])
            for name, mixing_of in ASYNCHRONOUS.items():
                times = [_asynchronous(mixing_of(size, seed), f, seed).seconds_to(TARGET) for f in FACTORS]
                seconds.setdefault((name, size), []).append(times)
            progress((done + (SIZES.index(size) + 1) / 3) / len(seeds))
        shards = _uneven_shards(digits(), SIZES[0], seed)
        for factor in FACTORS:
            curve = _asynchronous(random_ring(SIZES[0], seed), factor, seed, shards, until_s=LIMIT_S)
            rare[factor].append(_rare_accuracy(digits(), curve))
        progress((done + 1) / len(seeds))
    return _finding(seconds, rare)


def _finding(seconds: dict[tuple[str, int], list[list[float]]], rare: dict[float, list[float]]) -> Finding:
    figures: dict[str, Interval | float | str] = {}
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
        judged(holds=cope <= COPES and stall >= FACTORS[-1] / 2, fails=cope > FACTORS[-1] / 2 or stall < COPES),
        f"With one learner 100 times slower ADPSGD takes at most {cope:.2f} times as long to loss {TARGET} (every seed, both "
        f"rings, {SIZES[0]} and {SIZES[1]} learners); allreduce and delay-by-one take at least {stall:.0f} times as long. The "
        f"limit: if the straggler alone holds the digits {RARE[0]} and {RARE[1]}, the mean model gets "
        f"{100 * sum(rare[1.0]) / len(rare[1.0]):.0f} % of them right when it is as fast as the others and "
        f"{100 * sum(rare[100.0]) / len(rare[100.0]):.0f} % when it is 100 times slower, after the same time.",
        figures,
        _panels(seconds, rare),
    )


def _panels(seconds: dict[tuple[str, int], list[list[float]]], rare: dict[float, list[float]]) -> list[Panel]:
    panels = [
        Panel(
            f"{size} learners",
            "how many times slower learner 0 is",
            f"virtual time to loss {TARGET}, in usual steps",
            [Line(name, FACTORS, rows) for (name, of), rows in seconds.items() if of == size],
            log="xy",
        )
        for size in SIZES
    ]
    limit = Line("adpsgd random-ring", FACTORS, list(map(list, zip(*rare.values(), strict=True))))
    return [
        *panels,
        Panel("only the straggler has 8s and 9s", "how many times slower it is", "accuracy on 8s and 9s", [limit], "x"),
    ]


CLAIM = Claim(
    name="stragglers",
    sentence="ADPSGD on fixed and random rings copes with slow learners; allreduce and delay-by-one stall.",
    setting=f"digits, MLP 64-32-10, 16 and 64 learners x {BATCH} samples, lr {LR}, momentum 0.9, one learner 2, 10 or 100 times "
    f"slower, virtual time to consensus training loss {TARGET}; the limit on 16 learners after {LIMIT_S:g} usual steps",
    differs="one slow learner among 16 or 64 on a virtual clock, where an exchange takes a tenth of a step; the paper slowed one "
    "of 16 GPUs that trained an LSTM on speech",
    experiment=experiment,
)
