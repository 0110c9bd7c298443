"""Claim 2: decentralised and delay-by-one training tolerate larger batches and rates than allreduce (arXiv:2002.01119).

Setting: 16 learners classify speech frames of AN4, at global batches of 1,024 and 4,096 and at parts of the linearly
scaled rate. Controls are three remedies for allreduce: gradient clipping, a longer warm-up, half the rate.

Figures: area under the held-out loss. The advantage of a strategy is the area of a rival minus the strategy's own
area, so a positive advantage means ahead. The best control is the best of plain allreduce and the three remedies.

Verdict: reproduced if at some batch and rate both the random ring and delay-by-one are ahead of plain allreduce and
of the best control, with 95 % confidence. Not reproduced if they are ahead of plain allreduce somewhere, but nowhere
of the best control; or if the best control is ahead everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roundelay.errors import DataError, MissingExtraError
from roundelay.papers.claim import Claim, Figures, Finding, Interval, Line, Panel, Progress, verdict_from
from roundelay.papers.frames import an4_frames
from roundelay.papers.runs import accuracy, mean_loss, synchronous_run
from roundelay.simulation.problems import Problem
from roundelay.simulation.stacked import StackedAllreduce, StackedDelayByOne, StackedDPSGD, StackedStrategy
from roundelay.topology import random_ring, ring

LEARNERS, HIDDEN = 16, (64, 64)
BASE_LR, BASE_BATCH = 0.1, 256  # the papers' own, scaled linearly with the batch
STEPS, WARM_UP, LOOK_EVERY = 48, 12, 6
# Global batch, and the rate relative to linear scaling. A rate of 0.2 works well; we try 0.2, 0.4 and the scaled rate.
SCALED = ((1024, 0.5), (1024, 1.0), (4096, 0.125), (4096, 0.25), (4096, 1.0))
HELD_OUT = 4000


@dataclass(frozen=True)
class _Way:
    """One way to train: an update rule from a seed, or allreduce with a remedy."""

    strategy_of: Callable[[int], StackedStrategy]
    learners: int = LEARNERS
    lr: float = 1.0  # relative to the rate of the setting
    warm_up: int = WARM_UP
    clip: float = math.inf

    def rate(self, batch: int, factor: float, step: int) -> float:
        """Linear scaling and linear warm-up."""
        return self.lr * factor * BASE_LR * batch / BASE_BATCH * min(1.0, (step + 1) / self.warm_up)


def _allreduce(lr: float = 1.0, warm_up: int = WARM_UP, clip: float = math.inf) -> _Way:
    """One learner with the whole batch: replicas under allreduce are equal, so one replica gives the same model."""
    return _Way(lambda seed: StackedAllreduce(), 1, lr, warm_up, clip)


ALLREDUCE = "allreduce"
DECENTRALISED = {
    "dpsgd ring": _Way(lambda seed: StackedDPSGD(ring(LEARNERS))),
    "dpsgd random-ring": _Way(lambda seed: StackedDPSGD(random_ring(LEARNERS, seed))),
    "delay-by-one": _Way(lambda seed: StackedDelayByOne()),
}
CONTROLS = {
    "allreduce, clipped": _allreduce(clip=1.0),
    "allreduce, longer warm-up": _allreduce(warm_up=3 * WARM_UP),
    "allreduce, half the rate": _allreduce(lr=0.5),
}
WAYS = {ALLREDUCE: _allreduce(), **CONTROLS, **DECENTRALISED}
CLAIMED = ("dpsgd random-ring", "delay-by-one")


@dataclass
class _Run:
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0

    @property
    def area(self) -> float:
        """Mean held-out loss over the run: the area under the curve."""
        return sum(self.losses) / len(self.losses)


_Setting = tuple[int, float]
_Runs = dict[tuple[str, _Setting], list[_Run]]


def _train(problem: Problem, way: _Way, setting: _Setting, seed: int) -> _Run:
    (batch, factor), result, module = setting, _Run(), problem.module(seed)
    run = synchronous_run(
        problem,
        way.strategy_of(seed),
        way.learners,
        batch=batch // way.learners,
        seed=seed,
        lr=lambda step: way.rate(batch, factor, step),
        adjust=lambda gradients: _clip(gradients, way.clip),
    )
    held_out = problem.held_out[0][:HELD_OUT], problem.held_out[1][:HELD_OUT]
    worst = math.log(int(problem.train[1].max()) + 1)  # the loss of a model that guesses
    for step, learners in zip(range(STEPS + 1), run, strict=False):
        if step and step % LOOK_EVERY == 0:
            now = mean_loss(module, learners.consensus(), held_out)
            result.losses.append(min(now, worst) if math.isfinite(now) else worst)
            result.accuracy = accuracy(module, learners.consensus(), held_out)
    return result


def _clip(gradients: list[Tensor], largest: float) -> None:
    """Scale each learner's gradient to a norm of at most `largest`."""
    if math.isinf(largest):
        return
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    scale = (largest / norms).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))


def experiment(seeds: Sequence[int], progress: Progress) -> Finding:
    """Train in every way at every batch and rate."""
    try:
        problem = an4_frames(HIDDEN)
    except DataError:
        return Finding("inconclusive", "needs real speech: set ROUNDELAY_DATA to a folder that has our an4.tar.xz", {})
    except MissingExtraError as error:  # the other claims do not need it
        return Finding("inconclusive", str(error), {})
    runs: _Runs = {}
    for done, seed in enumerate(seeds):
        for at, setting in enumerate(SCALED):
            for name, way in WAYS.items():
                runs.setdefault((name, setting), []).append(_train(problem, way, setting, seed))
            progress((done + (at + 1) / len(SCALED)) / len(seeds))
    return _finding(runs)


def _finding(runs: _Runs) -> Finding:
    figures: Figures = {}
    for (name, setting), of in runs.items():
        label = f"{name}, {_said(setting)}"
        figures[f"area {label}"] = Interval.of([run.area for run in of])
        figures[f"accuracy {label}"] = Interval.of([run.accuracy for run in of])
    ahead: list[_Setting] = []  # settings in which both are ahead of plain allreduce
    survives: list[_Setting] = []  # ahead of the best control too
    over_controls: list[Interval] = []
    for setting in SCALED:
        plain = {name: _advantage(runs, name, [ALLREDUCE], setting) for name in CLAIMED}
        best = {name: _advantage(runs, name, [ALLREDUCE, *CONTROLS], setting) for name in CLAIMED}
        over_controls += best.values()
        for name in CLAIMED:
            figures[f"advantage of {name} over allreduce, {_said(setting)}"] = plain[name]
            figures[f"advantage of {name} over the best control, {_said(setting)}"] = best[name]
        if all(interval.low > 0 for interval in plain.values()):
            ahead.append(setting)
            if all(interval.low > 0 for interval in best.values()):
                survives.append(setting)
    never = all(interval.high <= 0 for interval in over_controls)
    return Finding(
        verdict_from(holds=bool(survives), fails=not survives and (bool(ahead) or never)),
        _sentence(ahead, survives),
        figures,
        _panels(runs),
    )


def _said(setting: _Setting) -> str:
    return f"batch {setting[0]}, {setting[1]:g} x the scaled rate"


def _sentence(ahead: list[_Setting], survives: list[_Setting]) -> str:
    if not ahead:
        return (
            "Nowhere is it certain (to 95 %, over these seeds) that both the random ring and delay-by-one have a smaller area "
            "under the held-out loss than plain allreduce."
        )
    settings = "; ".join(map(_said, ahead))
    begin = f"The random ring and delay-by-one have a smaller area under the held-out loss than plain allreduce at: {settings}. "
    if survives:
        return begin + f"That survives every control at: {'; '.join(map(_said, survives))}."
    return (
        begin
        + "Nowhere does that survive the controls: allreduce with clipping, a longer warm-up or half the rate does as well."
    )


def _advantage(runs: _Runs, name: str, rivals: list[str], setting: _Setting) -> Interval:
    """Area of the best rival minus the area of `name`, seed by seed: positive if `name` learns faster."""
    best = [min(of) for of in zip(*([run.area for run in runs[rival, setting]] for rival in rivals), strict=True)]
    return Interval.of([area - run.area for area, run in zip(best, runs[name, setting], strict=True)])


def _panels(runs: _Runs) -> list[Panel]:
    steps = list(range(LOOK_EVERY, STEPS + 1, LOOK_EVERY))
    return [
        Panel(
            _said(setting),
            "steps",
            "held-out loss",
            [Line(name, steps, [run.losses for run in runs[name, setting]], dashed=name in CONTROLS) for name in WAYS],
        )
        for setting in SCALED
    ]


CLAIM = Claim(
    name="large-batches",
    sentence="Decentralised and delay-by-one training tolerate larger batches and learning rates than allreduce.",
    setting=f"AN4 speech frames (440 features, 34 phones), ReLU MLP 440-64-64-34, {LEARNERS} learners, "
    f"batch 1,024 and 4,096 at the linearly scaled rate (0.1 per 256) and at parts of it, warm-up {WARM_UP} of {STEPS} steps, "
    "momentum 0.9; controls: allreduce clipped to norm 1, with three times the warm-up, at half the rate",
    differs="91,333 frames and an MLP of 34,594 parameters instead of an LSTM on 2,000 hours; 48 steps instead of 16 epochs",
    seed_s=24,
    experiment=experiment,
)
