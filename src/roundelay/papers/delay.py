"""Claim 4: delay-by-one converges fastest with large batches when learners are equally fast (arXiv:2110.11199)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from roundelay.papers.asynchronous import AsynchronousRun, Curve, first_below, pace
from roundelay.papers.claim import Claim, Finding, Interval, Line, Panel, Progress, judged
from roundelay.simulation.network import Links
from roundelay.simulation.problems import digits, loss
from roundelay.simulation.stacked import StackedLearners
from roundelay.strategies import DPSGD, Allreduce, DelayByOne, Strategy
from roundelay.topology import random_ring, ring

LEARNERS, STEPS, TARGET = 16, 60, 0.2
BASE_LR, BASE_BATCH, WARM_UP = 0.2, 256, 20  # linear scaling: 1024 samples at lr 0.8 after a warm-up over 20 steps
LARGE, SMALL = 64, 16  # samples of a learner and step
LINKS, MODEL_BYTES = Links(bandwidth_Bps=1.0), 0.3  # one model takes 0.3 of a step on a learner's port
DELAY = "delay-by-one"
SYNCHRONOUS: dict[str, Callable[[int], Strategy]] = {
    DELAY: lambda seed: DelayByOne(),
    "allreduce": lambda seed: Allreduce(),
    "dpsgd ring": lambda seed: DPSGD(ring(LEARNERS)),
    "dpsgd random-ring": lambda seed: DPSGD(random_ring(LEARNERS, seed)),
}
ADPSGD_NAME = "adpsgd random-ring"
HIDDEN = "allreduce, all hidden"  # what a perfect overlap with the backward pass would give


def _lr(batch: int, samples: int) -> float:
    scaled = BASE_LR * LEARNERS * batch / BASE_BATCH
    return scaled * min(1.0, (samples + 1) / (WARM_UP * LEARNERS * batch))


def _synchronous(strategy: Strategy, batch: int, step_s: float, seed: int) -> Curve:
    problem, curve = digits(), Curve()
    shards = problem.shards(LEARNERS, seed)
    learners = StackedLearners(
        problem.module(seed), loss, lambda w: torch.optim.SGD(w, lr=0.0, momentum=0.9), strategy, LEARNERS
    )
    for step in range(STEPS):
        samples = step * LEARNERS * batch
        curve.seconds.append(step * step_s)
        curve.samples.append(samples)
        curve.losses.append(learners.consensus_loss(problem.train))
        learners.optimizer.param_groups[0]["lr"] = _lr(batch, samples)
        learners.step(shards.batch(step, batch))
    return curve


def _asynchronous(batch: int, seed: int) -> Curve:
    problem = digits()
    return AsynchronousRun(
        problem,
        problem.shards(LEARNERS, seed),
        random_ring(LEARNERS, seed),
        batch,
        lambda samples: _lr(batch, samples),
        [1.0] * LEARNERS,
        seed,
        LINKS,
        MODEL_BYTES,
    ).curve(until_s=float(STEPS))


def experiment(seeds: Sequence[int], progress: Progress) -> Finding:
    """Loss over samples and over virtual seconds, with large batches and, as a control, with small ones."""
    paces = {name: _pace(strategy_of) for name, strategy_of in SYNCHRONOUS.items()}
    curves: dict[int, dict[str, list[Curve]]] = {LARGE: {}, SMALL: {}}
    for done, seed in enumerate(seeds):
        for batch, of in curves.items():
            for name, strategy_of in SYNCHRONOUS.items():
                of.setdefault(name, []).append(_synchronous(strategy_of(seed), batch, paces[name], seed))
            of.setdefault(ADPSGD_NAME, []).append(_asynchronous(batch, seed))
            progress((done + (0.5 if batch == LARGE else 1.0)) / len(seeds))
    seconds = {name: [curve.seconds_to(TARGET) for curve in of] for name, of in curves[LARGE].items()}
    samples, small = _samples(curves[LARGE]), _samples(curves[SMALL])
    seconds[HIDDEN] = [count / (LEARNERS * LARGE) for count in samples["allreduce"]]
    by_time, by_sample, by_small = _to_delay(seconds), _to_delay(samples), _to_delay(small)
    figures: dict[str, Interval | float | str] = {f"step time {name}": step_s for name, step_s in paces.items()}
    figures.update({f"time of {name} / delay-by-one's": ratio for name, ratio in by_time.items()})
    figures.update({f"samples of {name} / delay-by-one's": ratio for name, ratio in by_sample.items()})
    figures.update({f"small batch: samples of {name} / delay-by-one's": ratio for name, ratio in by_small.items()})
    rivals = [ratio for name, ratio in by_time.items() if name != HIDDEN]
    return Finding(
        judged(holds=all(ratio.low > 1 for ratio in rivals), fails=any(ratio.high < 1 for ratio in rivals)),
        f"Time to loss {TARGET} relative to delay-by-one's: {_list(by_time)}. Samples: {_list(by_sample)}. With a batch of "
        f"{LEARNERS * SMALL} instead of {LEARNERS * LARGE}, and so a smaller rate, samples: {_list(by_small)}.",
        figures,
        _panels(curves[LARGE]),
    )


def _pace(strategy_of: Callable[[int], Strategy]) -> float:
    return pace(lambda: strategy_of(0), LINKS, MODEL_BYTES, [1.0] * LEARNERS)


def _samples(curves: dict[str, list[Curve]]) -> dict[str, list[float]]:
    """Samples to the target."""
    return {name: [first_below(curve.samples, curve.losses, TARGET) for curve in of] for name, of in curves.items()}


def _to_delay(values: dict[str, list[float]]) -> dict[str, Interval]:
    return {name: _ratio(of, values[DELAY]) for name, of in values.items() if name != DELAY}


def _list(ratios: dict[str, Interval]) -> str:
    return ", ".join(f"{name} {ratio}" for name, ratio in ratios.items())


def _ratio(values: Sequence[float], reference: Sequence[float]) -> Interval:
    return Interval.of_ratios([value / its for value, its in zip(values, reference, strict=True)])


def _panels(curves: dict[str, list[Curve]]) -> list[Panel]:
    shortest = {name: min(len(curve.losses) for curve in of) for name, of in curves.items()}
    losses = {name: [curve.losses[: shortest[name]] for curve in of] for name, of in curves.items()}
    samples = {name: of[0].samples[: shortest[name]] for name, of in curves.items()}
    seconds = {name: of[0].seconds[: shortest[name]] for name, of in curves.items()}
    return [
        Panel("per sample", "samples", "consensus loss", [Line(n, samples[n], losses[n]) for n in curves], "y"),
        Panel(
            "per virtual second",
            "time in steps",
            "consensus loss",
            [Line(n, seconds[n], losses[n]) for n in curves],
            "y",
        ),
    ]


CLAIM = Claim(
    name="delay-by-one",
    sentence="With large batches and equally fast learners delay-by-one converges fastest.",
    setting=f"digits, MLP 64-32-10, {LEARNERS} learners x {LARGE} samples, lr {_lr(LARGE, 10**9):g} "
    f"after {WARM_UP} steps of warm-up, momentum 0.9; a model takes {MODEL_BYTES:g} of a step on a port; virtual time and "
    f"samples to consensus training loss {TARGET}",
    differs="a batch of 1,024 is two thirds of these data, as 8,192 is not of 2,000 hours; the time of a model relative "
    "to a step is ours, and nothing of the gradient allreduce is hidden behind backward "
    "(the figure with all of it hidden is given too)",
    experiment=experiment,
)
