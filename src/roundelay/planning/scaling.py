"""How a strategy scales: predicted speed-up and time per epoch from 1 learner to all learners of a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from roundelay.errors import TopologyError
from roundelay.planning.cluster import Cluster
from roundelay.planning.models import MODELS, step_cost
from roundelay.planning.ranking import Candidate
from roundelay.topology import complete, named


@dataclass(frozen=True)
class ScalingPoint:
    """One strategy with n learners, each with the same batch per step.

    Attributes:
        strategy: the label of the candidate.
        topology: its name; None if the strategy averages all learners.
        learners: n.
        step_s: mean time between two steps of a learner.
        speedup: steps per second of all learners, compared with one usual learner alone.
        efficiency: speedup / n.
        epoch_s: time of an epoch; None if the number of its steps is not known.
    """

    strategy: str
    topology: str | None
    learners: int
    step_s: float
    speedup: float
    efficiency: float
    epoch_s: float | None


def scaling(cluster: Cluster, candidates: Iterable[Candidate], epoch_steps: int | None = None) -> list[ScalingPoint]:
    """Each candidate at each of `sizes`, as far as its topology supports that number of learners.

    Args:
        cluster: the cluster with all its learners.
        candidates: strategies with their topologies, from `ranking`.
        epoch_steps: steps that one learner alone takes in an epoch.

    >>> from roundelay.planning.ranking import best_of_each, ranking
    >>> fast = Cluster(learners=64, model_bytes=165e6, step_s=0.3, bandwidth_Bps=12.5e9)
    >>> found = scaling(fast, best_of_each(ranking(fast)))
    >>> [round(point.speedup) for point in found if point.strategy == "adpsgd"]
    [1, 2, 4, 8, 16, 32, 64]
    """
    found = []
    for candidate in candidates:
        for learners in sizes(cluster):
            try:
                found.append(_point(candidate, _part(cluster, learners), epoch_steps))
            except TopologyError:  # this topology does not support so many learners
                continue
    return found


def sizes(cluster: Cluster) -> list[int]:
    """1, 2, 4, ... learners of one group, then 1, 2, 4, ... groups, then all learners.

    >>> sizes(Cluster(learners=24, model_bytes=1e6, step_s=0.1, group_size=3))
    [1, 2, 3, 6, 12, 24]
    """
    group = cluster.group_size
    powers = [2**k for k in range(cluster.learners.bit_length())]
    inside = {size for size in powers if size < group}
    return sorted(inside | {group * size for size in powers if group * size < cluster.learners} | {cluster.learners})


def _part(cluster: Cluster, learners: int) -> Cluster:
    """The first `learners` of a cluster."""
    return replace(cluster, learners=learners, group_size=min(cluster.group_size, learners))


def _point(candidate: Candidate, cluster: Cluster, epoch_steps: int | None) -> ScalingPoint:
    group_size = min(candidate.group_size, cluster.group_size)
    mixing_size = cluster.learners // group_size
    mixing = complete(mixing_size) if candidate.topology is None else named(candidate.topology, mixing_size)
    cost = step_cost(MODELS[candidate.strategy], mixing, cluster, group_size)
    speedup = cost.steps_per_s * cluster.step_s
    return ScalingPoint(
        candidate.label,
        candidate.topology,
        cluster.learners,
        cost.step_s,
        speedup,
        speedup / cluster.learners,
        None if epoch_steps is None else epoch_steps / cost.steps_per_s,
    )
