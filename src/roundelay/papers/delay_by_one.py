"""Claim 4: delay-by-one converges fastest with large batches when learners are equally fast (arXiv:2110.11199).

Setting: 16 equally fast learners on handwritten digits, with a batch of 1,024 samples and, as a control, of 256.
Sending a model takes 0.3 of a step. Rivals are allreduce, DPSGD on the fixed and on the random ring, and ADPSGD on
the random ring.

Figures: virtual time and samples to a consensus loss of 0.2, divided by those of delay-by-one, seed by seed. One more
figure says how fast allreduce would be if its communication were hidden completely; it is not a rival.

Verdict: reproduced if every rival takes longer, with 95 % confidence. Not reproduced if one rival is faster, with 95
% confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roundelay.papers.claim import Claim, Figures, Finding, Interval, Line, Panel, Progress, verdict_from
from roundelay.papers.runs import AsynchronousRun, Curve, first_below, synchronous_run
from roundelay.simulation.learners import seconds_per_step
from roundelay.simulation.network import Links
from roundelay.simulation.problems import digits
from roundelay.simulation.stacked import StackedAllreduce, StackedDelayByOne, StackedDPSGD, StackedStrategy
from roundelay.strategies import DPSGD, Allreduce, DelayByOne, Strategy
from roundelay.topology import random_ring, ring

LEARNERS, STEPS, TARGET = 16, 60, 0.2
BASE_LR, BASE_BATCH, WARM_UP = 0.2, 256, 20  # linear scaling: 1024 samples at lr 0.8 after a warm-up over 20 steps
LARGE, SMALL = 64, 16  # samples per learner and step
LINKS, MODEL_BYTES = Links(bandwidth_Bps=1.0), 0.3  # one model takes 0.3 of a step on a learner's port
DELAY = "delay-by-one"
# By name: the update rule from a seed, and the strategy, whose time per step does not depend on the seed.
SYNCHRONOUS: dict[str, tuple[Callable[[int], StackedStrategy], Callable[[], Strategy]]] = {
    DELAY: (lambda seed: StackedDelayByOne(), DelayByOne),
    "allreduce": (lambda seed: StackedAllreduce(), Allreduce),
    "dpsgd ring": (lambda seed: StackedDPSGD(ring(LEARNERS)), lambda: DPSGD(ring(LEARNERS))),
    "dpsgd random-ring": (
        lambda seed: StackedDPSGD(random_ring(LEARNERS, seed)),
        lambda: DPSGD(random_ring(LEARNERS)),
    ),
}
ADPSGD_NAME = "adpsgd random-ring"
HIDDEN = "allreduce, all hidden"  # what a perfect overlap with the backward pass would give


def _lr(batch: int, samples: int) -> float:
    scaled = BASE_LR * LEARNERS * batch / BASE_BATCH
    return scaled * min(1.0, (samples + 1) / (WARM_UP * LEARNERS * batch))


def _synchronous(strategy: StackedStrategy, batch: int, step_s: float, seed: int) -> Curve:
    problem, curve, per_step = digits(), Curve(), LEARNERS * batch
    run = synchronous_run(
        problem, strategy, LEARNERS, batch=batch, seed=seed, lr=lambda step: _lr(batch, step * per_step)
    )
    for step, learners in zip(range(STEPS), run, strict=False):
        curve.add(step * step_s, step * per_step, learners.consensus_loss(problem.train))
    return curve


def _asynchronous(batch: int, seed: int) -> Curve:
    problem, curve = digits(), Curve()
    run = AsynchronousRun(
        problem,
        problem.shards(LEARNERS, seed),
        random_ring(LEARNERS, seed),
        batch,
        lambda samples: _lr(batch, samples),
        [1.0] * LEARNERS,
        seed,
        LINKS,
        MODEL_BYTES,
    )
    for _, model in zip(range(STEPS + 1), run.mean_models(), strict=False):
        curve.add(model.seconds, model.samples, model.loss)
    return curve


def experiment(seeds: Sequence[int], progress: Progress) -> Finding:
    """Train with every strategy, with large batches and, as a control, with small ones."""
    step_s = {
        name: seconds_per_step(strategy_of, LINKS, MODEL_BYTES, [1.0] * LEARNERS)
        for name, (_, strategy_of) in SYNCHRONOUS.items()
    }
    curves: dict[int, dict[str, list[Curve]]] = {LARGE: {}, SMALL: {}}
    for done, seed in enumerate(seeds):
        for batch, of in curves.items():
            for name, (stacked_of, _) in SYNCHRONOUS.items():
                of.setdefault(name, []).append(_synchronous(stacked_of(seed), batch, step_s[name], seed))
            of.setdefault(ADPSGD_NAME, []).append(_asynchronous(batch, seed))
            progress((done + (0.5 if batch == LARGE else 1.0)) / len(seeds))
    seconds = {
        name: [first_below(curve.seconds, curve.losses, TARGET) for curve in of] for name, of in curves[LARGE].items()
    }
    samples, small = _samples(curves[LARGE]), _samples(curves[SMALL])
    seconds[HIDDEN] = [count / (LEARNERS * LARGE) for count in samples["allreduce"]]
    by_time, by_sample, by_small = _to_delay(seconds), _to_delay(samples), _to_delay(small)
    figures: Figures = {f"step time {name}": of for name, of in step_s.items()}
    figures.update({f"time of {name} / delay-by-one's": ratio for name, ratio in by_time.items()})
    figures.update({f"samples of {name} / delay-by-one's": ratio for name, ratio in by_sample.items()})
    figures.update({f"small batch: samples of {name} / delay-by-one's": ratio for name, ratio in by_small.items()})
    rivals = [ratio for name, ratio in by_time.items() if name != HIDDEN]
    return Finding(
        verdict_from(holds=all(ratio.low > 1 for ratio in rivals), fails=any(ratio.high < 1 for ratio in rivals)),
        f"Time to loss {TARGET} relative to delay-by-one's: {_list(by_time)}. Samples: {_list(by_sample)}. With a batch of "
        f"{LEARNERS * SMALL} instead of {LEARNERS * LARGE}, and so a smaller rate, samples: {_list(by_small)}.",
        figures,
        _panels(curves[LARGE]),
    )


def _samples(curves: dict[str, list[Curve]]) -> dict[str, list[float]]:
    """Samples to the target, by name and seed."""
    return {name: [first_below(curve.samples, curve.losses, TARGET) for curve in of] for name, of in curves.items()}


def _to_delay(values: dict[str, list[float]]) -> dict[str, Interval]:
    """Each rival's values divided by those of delay-by-one."""
    return {
        name: Interval.of_ratios([value / reference for value, reference in zip(of, values[DELAY], strict=True)])
        for name, of in values.items()
        if name != DELAY
    }


def _list(ratios: dict[str, Interval]) -> str:
    return ", ".join(f"{name} {ratio}" for name, ratio in ratios.items())


def _panels(curves: dict[str, list[Curve]]) -> list[Panel]:
    by_sample = [Line(name, of[0].samples, [curve.losses for curve in of]) for name, of in curves.items()]
    by_time = [Line(name, of[0].seconds, [curve.losses for curve in of]) for name, of in curves.items()]
    return [
        Panel("per sample", "samples", "consensus loss", by_sample, "y"),
        Panel("per virtual second", "time in steps", "consensus loss", by_time, "y"),
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
    seed_s=2.6,
    experiment=experiment,
    check=digits,
)
