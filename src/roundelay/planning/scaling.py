r"""How long an epoch takes with n learners: a max-plus recursion over the times $T_i(k)$ at which learner i begins step k.

With compute times c (lognormal), t the time of what is sent on `Links` and A that of an allreduce:

* allreduce: $T(k+1) = \max_j (T_j(k) + c_j) + \max(A - \tfrac23 \bar c, \text{last bucket})$;
* delay-by-one: $T_i(k+1) = \max(T_i(k) + c_i, \max_j T_j(k) + A)$;
* dpsgd: the same with the neighbours of the round and the swap of a node's learners through its one port;
* adpsgd: nobody waits, but a step takes at least an exchange / `MAX_LEAD`, for so far may a learner lead;
* super-learner: a node is one adpsgd learner whose step is its slowest member's, an allreduce inside and a broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from roundelay.simulation.network import Links
from roundelay.topology import Mixing, random_ring, ring
from roundelay.topology.mixing import Array

ROUNDS = 60
BACKWARD_SHARE = 2 / 3  # of a step: what the reduction of gradients can hide behind
BUCKET_BYTES = 25e6  # the last bucket of gradients has nothing left to hide behind
MAX_LEAD = 16
LEARNERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STRATEGIES = (
    "allreduce",
    "delay-by-one",
    "dpsgd ring",
    "dpsgd random-ring",
    "adpsgd random-ring",
    "super-learner adpsgd",
)


@dataclass(frozen=True)
class Job:
    """A model, its step and a cluster.

    Attributes:
        model_bytes: what one exchange sends one way.
        step_s: mean compute time of a learner's step.
        batch: samples of a learner's step.
        epoch_samples: samples of an epoch.
        links: the network; its `node_size` is the size of a super-learner.
        spread: standard deviation of a step's time relative to its mean.
    """

    model_bytes: float
    step_s: float
    batch: float
    epoch_samples: float
    links: Links = field(default_factory=Links)
    spread: float = 0.1

    def times_s(self, learners: int, seed: int) -> Array:
        """Compute times (rounds, learners)."""
        sigma2 = np.log1p(self.spread**2)
        drawn = np.random.default_rng(seed).lognormal(-sigma2 / 2, sigma2**0.5, (ROUNDS, learners))
        return np.asarray(self.step_s * drawn)


@dataclass(frozen=True)
class Prediction:
    """One strategy with n learners; times in seconds, the speed-up against one learner alone."""

    strategy: str
    learners: int
    step_s: float
    epoch_s: float
    speedup: float
    efficiency: float


def step_s(strategy: str, learners: int, job: Job, seed: int = 0) -> float:
    """Mean time between two steps of a learner."""
    if learners == 1:
        return job.step_s
    times = job.times_s(learners, seed)
    if strategy == "super-learner adpsgd":
        return _super_learner_s(job, times)
    if strategy == "adpsgd random-ring":
        return max(job.step_s, _exchange_s(job, learners, per_node=job.links.node_size) / MAX_LEAD)
    allreduce_s = job.links.allreduce_s(job.model_bytes, range(learners))
    if strategy == "allreduce":
        last = allreduce_s * min(1.0, BUCKET_BYTES / job.model_bytes)
        return float(times.max(axis=1).mean()) + max(allreduce_s - BACKWARD_SHARE * job.step_s, last)
    if strategy == "delay-by-one":
        return _pace(times, lambda T, round: np.full(learners, T.max() + allreduce_s))
    return _swapping_s(ring(learners) if strategy == "dpsgd ring" else random_ring(learners, seed), job, times)


def _pace(times: Array, heard: Callable[[Array, int], Array]) -> float:
    T = np.zeros(times.shape[1])
    for round, compute in enumerate(times):
        T = np.maximum(T + compute, heard(T, round))
    return float(T.mean()) / len(times)


def _swapping_s(mixing: Mixing, job: Job, times: Array) -> float:
    weights = [mixing.sparse(round) for round in range(1 if mixing.period == 1 else len(times))]
    swaps = [_swap_s(W.tocoo().row, W.tocoo().col, job, mixing.size) for W in weights]

    def heard(T: Array, round: int) -> Array:
        W, swap = weights[round % len(weights)], swaps[round % len(weights)]
        return np.asarray(np.maximum.reduceat(T[W.indices], W.indptr[:-1]) + swap)

    return _pace(times, heard)


def _swap_s(sender: Array, receiver: Array, job: Job, learners: int) -> Array:
    """By learner: until its node has sent all that leaves it, and it has sent all that stays inside."""
    links, node = job.links, np.arange(learners) // job.links.node_size
    a, b = node[sender], node[receiver]
    leaving = np.bincount(a[a != b], minlength=node[-1] + 1)[node]
    staying = np.bincount(sender[(a == b) & (sender != receiver)], minlength=learners)
    between = leaving * job.model_bytes / links.bandwidth_Bps + (leaving > 0) * links.latency_s
    inside = staying * (job.model_bytes / links.inside_bandwidth_Bps + links.inside_latency_s)
    return np.asarray(np.maximum(between, inside))


def _exchange_s(job: Job, learners: int, per_node: int) -> float:
    """A model each way, when all learners of a node, callers and called alike, go through its port at once."""
    links = job.links
    apart = max(learners - links.node_size, 0) / max(learners - 1, 1)  # part of the exchanges that leave the node
    through_port = 2 * per_node * apart * job.model_bytes / links.bandwidth_Bps
    near = 2 * (links.inside_latency_s + job.model_bytes / links.inside_bandwidth_Bps)
    return max(through_port + 2 * links.latency_s, near) if apart else near


def _super_learner_s(job: Job, times: Array) -> float:
    links, learners = job.links, times.shape[1]
    g = min(links.node_size, learners)
    whole = times[:, : learners // g * g].reshape(len(times), -1, g).max(axis=2)
    inside_s = replace(links, node_size=g).allreduce_s(job.model_bytes, range(g))
    exposed = max(inside_s - BACKWARD_SHARE * job.step_s, 0.0)
    broadcast_s = inside_s / 2
    own = float(whole.mean()) + exposed + (broadcast_s if g > 1 else 0.0)
    return max(own, _exchange_s(job, learners, per_node=1) / MAX_LEAD)


def predict(
    job: Job, strategies: tuple[str, ...] = STRATEGIES, learners: tuple[int, ...] = LEARNERS
) -> list[Prediction]:
    """Every strategy at every number of learners, with the same batch per learner.

    >>> job = Job(model_bytes=165e6, step_s=0.3, batch=128, epoch_samples=1e6, links=Links(5e-6, 12.5e9))
    >>> [round(row.efficiency, 2) for row in predict(job, ("adpsgd random-ring",), (1, 64))]
    [1.0, 1.0]
    """
    found = []
    alone = job.epoch_samples / job.batch * step_s("allreduce", 1, job)
    for strategy in strategies:
        for n in learners:
            own = step_s(strategy, n, job)
            epoch = job.epoch_samples / (job.batch * n) * own
            found.append(Prediction(strategy, n, own, epoch, alone / epoch, alone / epoch / n))
    return found


# The papers' setting. Their cluster: V100 GPUs, 100 Gb/s between nodes; 16 epochs of 2,000 hours in windows of 21 frames.
PAPER_MODEL_BYTES = 164.6 * 2**20
PAPER_SAMPLES = 16 * 2000 * 3600 * 100 / 21
PAPER_LINKS = Links(latency_s=5e-6, bandwidth_Bps=12.5e9, node_size=4, inside_latency_s=5e-6, inside_bandwidth_Bps=50e9)
PAPER_STRATEGY = "super-learner adpsgd"


@dataclass(frozen=True)
class Published:
    """Hours that were published, with how many GPUs; the batch is our reading; `fitted` ones gave the time of a sample."""

    system: str
    learners: int
    batch: int
    hours: float
    fitted: bool


PUBLISHED = (
    Published("first", 16, 2560, 14.0, fitted=True),
    Published("first", 64, 8192, 5.2, fitted=False),
    Published("second", 64, 8192, 2.28, fitted=True),
    Published("second", 128, 8192, 1.98, fitted=False),
)


def paper_hours(sample_s: float, learners: int, batch: int) -> float:
    """The whole training, if one GPU needs `sample_s` for a sample."""
    own = batch / learners
    job = Job(PAPER_MODEL_BYTES, sample_s * own, own, PAPER_SAMPLES, PAPER_LINKS)
    return PAPER_SAMPLES / batch * step_s(PAPER_STRATEGY, learners, job) / 3600


def fitted_sample_s(published: Published) -> float:
    """The time of a sample on one GPU at which the model gives the published hours, by bisection."""
    low, high = 1e-7, 1.0
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        slow = paper_hours(middle, published.learners, published.batch) > published.hours
        low, high = (low, middle) if slow else (middle, high)
    return float((low * high) ** 0.5)


def papers() -> list[dict[str, float | int | bool | str]]:
    """Published hours beside predicted ones; one number per system, the time of a sample, is fitted to its first row."""
    rows: list[dict[str, float | int | bool | str]] = []
    sample_s = 0.0
    for row in PUBLISHED:
        if row.fitted:
            sample_s = fitted_sample_s(row)
        predicted = paper_hours(sample_s, row.learners, row.batch)
        rows.append(
            {
                "system": row.system,
                "learners": row.learners,
                "batch": row.batch,
                "published_h": row.hours,
                "predicted_h": predicted,
                "fitted": row.fitted,
                "sample_s": sample_s,
            }
        )
    return rows
