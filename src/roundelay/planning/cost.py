r"""The cost model: how long a step takes, by strategy. `ranking` and `scaling` both use it.

The model of a synchronous strategy is a recursion over the times $T_i(k)$ at which learner i begins step k, run for some
rounds with sampled compute times $c_i$. A is the time of an allreduce. $s_i$ is the time to send all models that learner
i's machine sends in a round:

* allreduce: $T(k+1) = \max_j (T_j(k) + c_j) +$ the part of A that the backward pass does not hide;
* delay-by-one: $T_i(k+1) = \max(T_i(k) + c_i, \max_j T_j(k) + A)$;
* dpsgd: $T_i(k+1) = \max(T_i(k) + c_i, \max_{j \in N_i} T_j(k) + s_i)$.

adpsgd: learner i has one exchange under way and does not wait for it. It starts the next exchange at the end of a step.
An exchange of e seconds thus lasts $\lceil e / c_i \rceil$ steps. After `MAX_LEAD` steps the learner does wait.

local-sgd: the learner that comes to its outer step first asks the neighbours of the round, which answer at once. A round
lasts as long as H steps of a usual learner, plus the messages: $R = H c + s$. In this time learner i takes
$\min(H, R / c_i)$ steps.

A super-learner is one learner. Its step takes as long as that of its slowest member, plus a reduction and a broadcast
inside the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from roundelay.planning.cluster import Cluster
from roundelay.topology.mixing import Array, Mixing, Ranks, RelabelledMixing

MAX_LEAD = 16  # the default of roundelay.ADPSGD
LOCAL_STEPS = 50  # the default of roundelay.LocalSGD


@dataclass(frozen=True)
class StepCost:
    """Predicted speed of a strategy.

    Attributes:
        steps_per_s: steps of all learners together.
        step_s: mean time between two steps of a learner.
        exchanges_per_step: averagings that a learner starts per step.
    """

    steps_per_s: float
    step_s: float
    exchanges_per_step: float


CostModel = Callable[[Cluster, Array, Mixing], StepCost]
"""(cluster, compute times (rounds, learners), mixing) -> cost of a step."""


def allreduce(cluster: Cluster, times: Array, mixing: Mixing) -> StepCost:
    """All learners wait for the slowest one, then for the part of the reduction that is not hidden."""
    return _in_step(cluster, float(times.max(axis=1).mean()) + cluster.exposed_s(cluster.allreduce_s))


def delay_by_one(cluster: Cluster, times: Array, mixing: Mixing) -> StepCost:
    """The allreduce of the weights runs during the step."""
    allreduce_s = cluster.allreduce_s
    return _in_step(cluster, _pace(times, lambda T, round: T.max() + allreduce_s))


def dpsgd(cluster: Cluster, times: Array, mixing: Mixing) -> StepCost:
    """During a step the learner receives the weights of its neighbours; if they are late, it waits."""
    rounds = len(times) if mixing.period is None else min(mixing.period, len(times))
    swaps = [_Swap.of(cluster, mixing, round) for round in range(rounds)]
    return _in_step(cluster, _pace(times, lambda T, round: swaps[round % rounds].received(T)))


def adpsgd(cluster: Cluster, times: Array, mixing: Mixing) -> StepCost:
    """A learner waits only if one exchange takes more than MAX_LEAD steps."""
    compute_s = times.mean(axis=0)
    if cluster.learners == 1:
        return StepCost(1 / float(compute_s[0]), float(compute_s[0]), 0.0)
    leaving = _part_between_groups(mixing, cluster.group_size)
    steps, seconds = np.zeros(cluster.learners), np.zeros(cluster.learners)  # per exchange, on average
    for part, exchange_s in (
        (leaving, _exchange_between_s(cluster, leaving)),
        (1 - leaving, _exchange_inside_s(cluster)),
    ):
        lasting = np.minimum(np.ceil(exchange_s / compute_s), MAX_LEAD)
        steps += part * lasting
        seconds += part * np.maximum(exchange_s, lasting * compute_s)
    steps_per_s = float((steps / seconds).sum())
    return StepCost(steps_per_s, cluster.learners / steps_per_s, float((1 / steps).mean()))


def local_sgd(cluster: Cluster, times: Array, mixing: Mixing) -> StepCost:
    """Learners wait only for the messages of a round, once in LOCAL_STEPS steps; a slow one takes fewer steps."""
    compute_s = times.mean(axis=0)
    if cluster.learners == 1:
        return StepCost(1 / float(compute_s[0]), float(compute_s[0]), 0.0)
    messages_s = 2 * cluster.latency_s  # asking the neighbours
    rounds = list(mixing.typical_rounds())
    for round in rounds:
        ranks, peers, _ = mixing.entries(round)
        messages_s += float(_swap_s(cluster, ranks, peers).max()) / len(rounds)
    round_s = LOCAL_STEPS * float(np.median(compute_s)) + messages_s
    steps_per_s = float(np.minimum(LOCAL_STEPS, round_s / compute_s).sum()) / round_s
    return StepCost(steps_per_s, cluster.learners / steps_per_s, 1 / LOCAL_STEPS)


def super_learner(between: CostModel, cluster: Cluster, times: Array, mixing: Mixing) -> StepCost:
    """Groups of `cluster.group_size` learners reduce gradients inside, and `between` runs between the groups."""
    reduction_s = cluster.one_group().allreduce_s
    broadcast_s = reduction_s / 2  # a pipeline sends every byte once, a ring allreduce twice
    slowest = times.reshape(len(times), -1, cluster.group_size).max(axis=2)
    cost = between(cluster.of_groups(), slowest + cluster.exposed_s(reduction_s) + broadcast_s, mixing)
    return replace(cost, steps_per_s=cost.steps_per_s * cluster.group_size)


def _in_step(cluster: Cluster, step_s: float) -> StepCost:
    """The cost if all learners step at the same pace and average once per step."""
    return StepCost(cluster.learners / step_s, step_s, 1.0)


def _pace(times: Array, received: Callable[[Array, int], Array | float]) -> float:
    """Mean step time of the recursion T_i(k+1) = max(T_i(k) + c_i(k), received_i(T(k), k)).

    Counted for the learner that is last at the end: in the long run all learners step at its pace.
    """
    T = np.zeros(times.shape[1])
    for round, compute_s in enumerate(times):
        T = np.maximum(T + compute_s, received(T, round))
    return float(T.max()) / len(times)


@dataclass(frozen=True)
class _Swap:
    """One round of dpsgd: the peers of all learners one after the other, where each learner's peers start, and s_i."""

    peers: Ranks
    starts: Ranks
    seconds: Array

    @classmethod
    def of(cls, cluster: Cluster, mixing: Mixing, round: int) -> _Swap:
        ranks, peers, _ = mixing.entries(round)
        return cls(peers, np.searchsorted(ranks, np.arange(mixing.size)), _swap_s(cluster, ranks, peers))

    def received(self, T: Array) -> Array:
        """max over the neighbours j of T_j + s_i."""
        return np.asarray(np.maximum.reduceat(T[self.peers], self.starts) + self.seconds)


def _swap_s(cluster: Cluster, ranks: Ranks, peers: Ranks) -> Array:
    """s_i: until all models that leave i's machine are sent through its link, and all that stay inside are sent by i.

    Messages are pipelined, so latency counts once.
    """
    links, size = cluster.links, cluster.learners
    machine = np.arange(size) // cluster.group_size
    inside = machine[ranks] == machine[peers]
    leaving = np.bincount(machine[ranks[~inside]], minlength=size)[machine]
    staying = np.bincount(ranks[inside & (ranks != peers)], minlength=size)
    between_s = leaving * cluster.model_bytes / links.bandwidth_Bps + (leaving > 0) * links.latency_s
    inside_s = staying * cluster.model_bytes / links.inside_bandwidth_Bps + (staying > 0) * links.inside_latency_s
    return np.asarray(np.maximum(between_s, inside_s))


def _exchange_between_s(cluster: Cluster, leaving: Array) -> Array:
    """Time by learner of an exchange with another group: request and answer, which share the machine's link.

    The link carries the exchanges that the machine's learners start, and as many that they answer.
    """
    at_once = leaving.reshape(-1, cluster.group_size).sum(axis=1).repeat(cluster.group_size)
    return np.asarray(2 * (cluster.latency_s + np.maximum(at_once, 1) * cluster.model_bytes / cluster.bandwidth_Bps))


def _exchange_inside_s(cluster: Cluster) -> Array:
    """Time by learner of an exchange inside a group: request and answer."""
    links = cluster.links
    once_s = links.inside_latency_s + cluster.model_bytes / links.inside_bandwidth_Bps
    return np.full(cluster.learners, 2 * once_s)


def _part_between_groups(mixing: Mixing, group_size: int) -> Array:
    """By learner, the part of its neighbours that belong to other groups."""
    n = mixing.size
    if isinstance(mixing, RelabelledMixing):
        return np.full(n, (n - group_size) / (n - 1))
    leaving, neighbours = np.zeros(n), np.zeros(n)
    for round in mixing.typical_rounds():
        ranks, peers, _ = mixing.entries(round)
        neighbours += np.bincount(ranks[ranks != peers], minlength=n)
        leaving += np.bincount(ranks[ranks // group_size != peers // group_size], minlength=n)
    return leaving / np.maximum(neighbours, 1)
