"""Which strategy on which topology suits a cluster: every combination, best first, each with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from roundelay.planning.cluster import Cluster
from roundelay.planning.cost import MAX_LEAD, StepCost
from roundelay.planning.models import MODELS, step_cost
from roundelay.topology import complete, every
from roundelay.topology.mixing import Array

ALIKE = 0.05  # throughputs within 5 % of each other count as equal; then the smaller spread of the replicas wins
WIDE_SPREAD = 4.0  # with a larger stationary variance replicas drift apart, and the candidate ranks as if half as fast
DRIFTING = "; replicas drift apart"
FAST_ENOUGH = 0.9  # links on which adpsgd keeps this part of its steps need no local steps

LEFT_OUT = (
    "Left out: contention beyond the machines' own links, copying and averaging weights, data loading, failures, the "
    "lower efficiency of small batches, and how spread and staleness act on your loss; measure with `roundelay bench throughput`."
)


@dataclass(frozen=True)
class Candidate:
    """One strategy on one topology, as predicted.

    Attributes:
        strategy: its name.
        topology: its name; None if the strategy averages all learners.
        group_size: learners per super-learner; 1 without super-learners.
        step_s: mean time between two steps of a learner.
        steps_per_s: steps of all learners together.
        ratio_to_ideal: steps_per_s / steps_per_s without any communication or waiting.
        exchanges_per_step: averagings that a learner starts per step.
        stationary_variance: spread of the replicas in units of (alpha sigma)^2; None if it has no bound.
        adam_lr_factor: the most by which Adam's learning rate must be larger than with allreduce: the root of the number of
            gradients that allreduce averages and this strategy does not.
        reason: one sentence.
    """

    strategy: str
    topology: str | None
    group_size: int
    step_s: float
    steps_per_s: float
    ratio_to_ideal: float
    exchanges_per_step: float
    stationary_variance: float | None
    adam_lr_factor: float
    reason: str

    @property
    def label(self) -> str:
        """The strategy, with the size of the super-learners if there are any."""
        return f"{self.strategy}, groups of {self.group_size}" if self.group_size > 1 else self.strategy


def ranking(cluster: Cluster) -> list[Candidate]:
    """Every strategy on every topology that supports this many learners, best first.

    Ranked by throughput; candidates within 5 % of each other are ranked by the spread of the replicas. A candidate whose
    replicas drift apart ranks as if it were half as fast.

    >>> slow = Cluster(learners=16, model_bytes=170e6, step_s=0.3, slowest_factor=10)
    >>> best = ranking(slow)[0]
    >>> best.strategy, best.ratio_to_ideal > 0.9
    ('adpsgd', True)
    """
    group_sizes = sorted({1, cluster.group_size})
    return sorted((row for size in group_sizes for row in _candidates(cluster, size)), key=_rank)


def best_of_each(ranked: list[Candidate]) -> list[Candidate]:
    """Each strategy on its best topology, in the order of the ranking."""
    best: dict[str, Candidate] = {}
    for candidate in ranked:
        best.setdefault(candidate.label, candidate)
    return list(best.values())


def adam_advice(best: Candidate) -> str | None:
    """What Adam's learning rate must be with this candidate; None if it is that of DDP."""
    if best.adam_lr_factor == 1:
        return None
    return (
        f"With Adam or AdamW, {best.label} may need up to {best.adam_lr_factor:.2g} times the learning rate of DDP, because each "
        "optimizer sees the noise of its own small batch; see docs/strategies/index.md#adam."
    )


def _rank(candidate: Candidate) -> tuple[int, float]:
    variance = candidate.stationary_variance
    worth = candidate.ratio_to_ideal / (2 if _drifts(variance) else 1)
    # Rounded, so that rounding errors do not decide between topologies of equal variance.
    return -round(np.log(worth) / np.log1p(ALIKE)), np.inf if variance is None else round(variance, 9)


def _drifts(variance: float | None) -> bool:
    return variance is None or variance > WIDE_SPREAD


def _candidates(cluster: Cluster, group_size: int) -> Iterator[Candidate]:
    mixing_size = cluster.learners // group_size
    compute_s = cluster.compute_times().mean(axis=0)
    for strategy, model in MODELS.items():
        if group_size > 1 and not model.takes_groups:
            continue
        for mixing in every(mixing_size)[0] if model.has_topology else [complete(mixing_size)]:
            cost = step_cost(model, mixing, cluster, group_size)
            variance = model.variance(mixing, cost.exchanges_per_step)
            if variance is not None:
                variance /= group_size  # the mean gradient of g learners has 1/g of the noise variance of one gradient
            if model.local_steps > 1:
                pairs = step_cost(MODELS["adpsgd"], mixing, cluster, group_size)
                reason = _local_reason(cost, pairs, compute_s, model.local_steps)
            else:
                reason = (
                    _synchronous_reason(cost, compute_s)
                    if model.synchronous
                    else _asynchronous_reason(cost, compute_s, group_size)
                )
                reason += DRIFTING if _drifts(variance) else ""
            yield Candidate(
                strategy,
                mixing.name if model.has_topology else None,
                group_size,
                cost.step_s,
                cost.steps_per_s,
                ratio_to_ideal=cost.steps_per_s / float((1 / compute_s).sum()),
                exchanges_per_step=cost.exchanges_per_step,
                stationary_variance=variance,
                adam_lr_factor=1.0 if model.averages_gradients else mixing_size**0.5,
                reason=reason,
            )


def _synchronous_reason(cost: StepCost, compute_s: Array) -> str:
    """Why a synchronous strategy is as fast as it is."""
    usual_s, slowest_s = float(np.median(compute_s)), float(compute_s.max())
    if cost.step_s < 1.05 * usual_s:
        return "communication and waiting hide behind the step"
    if slowest_s > 1.1 * usual_s and slowest_s > 0.9 * cost.step_s:
        return f"all learners take steps as slowly as the slowest one, {cost.step_s / usual_s:.2g} times a usual step"
    return f"{(cost.step_s - usual_s) * 1e3:.3g} ms of a step are communication, or waiting for random slow steps"


def _local_reason(cost: StepCost, pairs: StepCost, compute_s: Array, local_steps: int) -> str:
    """Why local-sgd is as fast as it is, and whether it is the right choice: `pairs` is the cost of adpsgd."""
    ideal = float((1 / compute_s).sum())
    lost, kept = 1 - cost.steps_per_s / ideal, pairs.steps_per_s / ideal
    costs = "nothing" if lost < 0.005 else f"{lost:.2g} of the steps"
    advice = '; compress="int8" sends a quarter of that, and overlap=True hides it' if lost > 0.1 else ""
    verdict = (
        f"the right choice, because links are too slow for adpsgd, which would keep {kept:.2g} of its steps"
        if kept < FAST_ENOUGH
        else "not needed, because links are fast enough to average more often"
    )
    return f"weights travel once in {local_steps} steps, which costs {costs}{advice}; {verdict}"


def _asynchronous_reason(cost: StepCost, compute_s: Array, group_size: int) -> str:
    """Why an asynchronous strategy is as fast as it is."""
    exchanges, usual_s = cost.exchanges_per_step, float(np.median(compute_s))
    if not exchanges:
        return "there is no other learner to exchange with"
    if exchanges < 1.5 / MAX_LEAD and cost.steps_per_s < 0.95 * float((1 / compute_s).sum()):
        return f"the links are too slow: one exchange takes {cost.step_s / exchanges / usual_s:.3g} usual steps"
    often = "one exchange" if exchanges > 0.995 else f"{exchanges:.2g} exchanges"
    inside = (
        "; a group's step is that of its slowest member, plus a reduction and a broadcast" if group_size > 1 else ""
    )
    return f"no learner waits for another; {often} a step{inside}"
