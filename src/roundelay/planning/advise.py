r"""Which strategy on which topology suits a cluster: a prediction from six numbers.

Synchronous strategies are a max-plus recursion over the times $T_i(k)$ at which learner i begins step k, run for some
rounds with sampled step times c:

* allreduce: $T(k+1) = \max_j (T_j(k) + c_j) +$ what of the allreduce the backward pass does not hide;
* dpsgd: $T_i(k+1) = \max(T_i(k) + c_i, \max_{j \in N_i} T_j(k) + d_i t)$, t the time of one model on the wire;
* delay-by-one: the same with everyone as neighbour and the time of an allreduce.

adpsgd never waits; an exchange takes a model each way, and `MAX_LEAD` steps without one make the learner wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from roundelay.errors import TopologyError
from roundelay.topology.mixing import DENSE_LIMIT, SAMPLED_ROUNDS, Array, Mixing, RelabelledMixing
from roundelay.topology.registry import every
from roundelay.topology.spectrum import spectrum

ROUNDS = 60
BACKWARD_SHARE = 2 / 3  # of a step: what communication of gradients can hide behind
BUCKET_BYTES = 25e6  # the last bucket of gradients has nothing left to hide behind, as in DDP
MAX_LEAD = 16
ALIKE = 0.05  # throughputs within 5 % of each other count as equal, and the smaller spread wins

LEFT_OUT = (
    "Left out: contention inside the network and between NICs and memory, the cost of copying and averaging weights, "
    "data loading, failures, and how spread and staleness act on your loss; measure with `roundelay bench`."
)


@dataclass(frozen=True)
class Situation:
    """A cluster and a model.

    Attributes:
        learners: how many.
        model_bytes: what one exchange sends one way.
        step_s: mean compute time of a step.
        step_spread: standard deviation of a step's time relative to its mean (lognormal).
        slowest_factor: how many times slower the slowest learner is.
        bandwidth_Bps: of each learner's link, both ways at once.
        latency_s: of one message.
        group_size: learners in a super-learner; 1 for none.
        group_bandwidth_Bps: inside a group; that of the link if None.
    """

    learners: int
    model_bytes: float
    step_s: float
    step_spread: float = 0.1
    slowest_factor: float = 1.0
    bandwidth_Bps: float = 1.25e9
    latency_s: float = 50e-6
    group_size: int = 1
    group_bandwidth_Bps: float | None = None

    def __post_init__(self) -> None:
        for name in ("learners", "model_bytes", "step_s", "bandwidth_Bps", "group_size"):
            if not getattr(self, name) > 0:
                raise TopologyError(f"{name} must be more than 0, got {getattr(self, name)}")
        if self.group_bandwidth_Bps is not None and not self.group_bandwidth_Bps > 0:
            raise TopologyError(f"group_bandwidth_Bps must be more than 0, got {self.group_bandwidth_Bps}")
        if self.step_spread < 0 or self.latency_s < 0:
            raise TopologyError(f"step_spread and latency_s are at least 0, got {self.step_spread}, {self.latency_s}")
        if self.slowest_factor < 1:
            raise TopologyError(f"slowest_factor is at least 1 (how many times slower), got {self.slowest_factor}")
        if self.learners > DENSE_LIMIT:
            raise TopologyError(f"advise models at most {DENSE_LIMIT} learners, got {self.learners}")
        if self.learners % self.group_size:
            raise TopologyError(f"group_size must divide {self.learners} learners, got {self.group_size}")

    def model_s(self) -> float:
        """One model over one link."""
        return self.latency_s + self.model_bytes / self.bandwidth_Bps

    def allreduce_s(self) -> float:
        """A ring allreduce of one model among all learners."""
        n = self.learners
        return 2 * (n - 1) * (self.latency_s + self.model_bytes / n / self.bandwidth_Bps)

    def steps_s(self, rng: np.random.Generator) -> Array:
        """Sampled compute times (rounds, learners); learner 0 is the slow one."""
        sigma2 = np.log1p(self.step_spread**2)
        times = self.step_s * rng.lognormal(-sigma2 / 2, np.sqrt(sigma2), (ROUNDS, self.learners))
        times[:, 0] *= self.slowest_factor
        return np.asarray(times)


@dataclass(frozen=True)
class Advice:
    """One strategy on one topology, as predicted.

    Attributes:
        strategy: its name, with the group size for super-learners.
        topology: its name, None where the strategy has none.
        step_s: mean time between two steps of a learner.
        steps_per_s: steps of all learners together.
        ratio_to_ideal: steps_per_s over that without any communication or waiting.
        exchanges_per_step: averagings per learner and step.
        stationary_variance: spread of the replicas in units of (alpha sigma)^2, None where unbounded.
        reason: one sentence.
    """

    strategy: str
    topology: str | None
    step_s: float
    steps_per_s: float
    ratio_to_ideal: float
    exchanges_per_step: float
    stationary_variance: float | None
    reason: str


def advise(situation: Situation, seed: int = 0) -> list[Advice]:
    """Every strategy on every topology that this many learners can have, best first.

    Ranked by throughput; of those within 5 % of each other, by the spread of the replicas.

    >>> slow = Situation(learners=16, model_bytes=170e6, step_s=0.3, slowest_factor=10)
    >>> best = advise(slow)[0]
    >>> best.strategy, best.ratio_to_ideal > 0.9
    ('adpsgd', True)
    """
    times = situation.steps_s(np.random.default_rng(seed))
    found = list(_between(situation, times))
    if situation.group_size > 1:
        found += _super_learners(situation, times)
    ideal = float((1 / times.mean(axis=0)).sum())
    advice = [replace(row, ratio_to_ideal=row.steps_per_s / ideal) for row in found]
    return sorted(advice, key=_rank)


def _rank(row: Advice) -> tuple[int, float]:
    band = round(np.log(row.ratio_to_ideal) / np.log1p(ALIKE))
    return -band, np.inf if row.stationary_variance is None else row.stationary_variance


def _between(situation: Situation, times: Array) -> Iterator[Advice]:
    n = situation.learners
    mixings, _ = every(n)
    yield _allreduce(situation, times)
    everyone = _pace(times, lambda T, round: np.full(n, T.max() + situation.allreduce_s()))
    yield _synchronous("delay-by-one", None, situation, times, everyone, variance=(n - 1) / n)
    for mixing in mixings:
        yield _dpsgd(mixing, situation, times)
    for mixing in mixings:
        yield _adpsgd(mixing, situation, times)


def _allreduce(situation: Situation, times: Array) -> Advice:
    whole = situation.allreduce_s()
    last_bucket = whole * min(1.0, BUCKET_BYTES / situation.model_bytes)
    exposed = max(whole - BACKWARD_SHARE * situation.step_s, last_bucket) if situation.learners > 1 else 0.0
    step_s = float(times.max(axis=1).mean()) + exposed
    return _synchronous("allreduce", None, situation, times, step_s, variance=0.0)


def _dpsgd(mixing: Mixing, situation: Situation, times: Array) -> Advice:
    rounds = range(ROUNDS if mixing.period is None else min(mixing.period, ROUNDS))
    weights, degrees = [mixing.sparse(round) for round in rounds], [mixing.degrees(round) for round in rounds]

    def heard(T: Array, round: int) -> Array:
        W, degree = weights[round % len(rounds)], degrees[round % len(rounds)]
        latest = np.maximum.reduceat(T[W.indices], W.indptr[:-1])
        return np.asarray(latest + degree * situation.model_s())

    step_s = _pace(times, heard)
    return _synchronous("dpsgd", mixing.name, situation, times, step_s, variance=spectrum(mixing).stationary_variance)


def _pace(times: Array, heard: Callable[[Array, int], Array]) -> float:
    """Mean step time of T_i(k+1) = max(T_i(k) + c_i(k), when everything it waits for has come in)."""
    T = np.zeros(times.shape[1])
    for round, compute in enumerate(times):
        T = np.maximum(T + compute, heard(T, round))
    return float(T.mean()) / len(times)


def _synchronous(
    strategy: str, topology: str | None, situation: Situation, times: Array, step_s: float, *, variance: float | None
) -> Advice:
    own, slowest = float(np.median(times.mean(axis=0))), float(times.mean(axis=0).max())
    if step_s < 1.05 * own:
        reason = "communication and waiting hide behind the step"
    elif slowest > 1.1 * own and slowest > 0.9 * step_s:
        reason = f"everyone ends up at the pace of the slowest learner, {step_s / own:.2g} times a usual step"
    else:
        reason = (
            f"{(step_s - own) * 1e3:.3g} ms of a step are spent on communication or on waiting for random slow steps"
        )
    return Advice(strategy, topology, step_s, situation.learners / step_s, 0.0, 1.0, variance, reason)


def _adpsgd(mixing: Mixing, situation: Situation, times: Array) -> Advice:
    exchange_s = 2 * situation.model_s() if situation.learners > 1 else 0.0
    steps = np.maximum(times.mean(axis=0), exchange_s / MAX_LEAD)
    exchanges = float(np.minimum(1.0, steps / exchange_s).mean()) if exchange_s else 0.0
    variance = _pairwise_variance(mixing, exchanges)
    reason = f"nobody waits; {_exchanges_text(situation.learners, exchanges)}"
    if steps.max() > 1.05 * times.mean(axis=0).max():
        reason = f"the link is too slow: one exchange takes {exchange_s / situation.step_s:.3g} steps"
    elif variance is None or variance > 4:
        reason += ", but this graph is slow to carry them: replicas drift apart"
    n = situation.learners
    return Advice(
        "adpsgd", mixing.name, n / float((1 / steps).sum()), float((1 / steps).sum()), 0.0, exchanges, variance, reason
    )


def _exchanges_text(learners: int, exchanges: float) -> str:
    if learners == 1:
        return "there is nobody to exchange with"
    return "one exchange a step" if exchanges > 0.995 else f"{exchanges:.2g} exchanges a step"


def _pairwise_variance(mixing: Mixing, exchanges: float) -> float | None:
    """Stationary variance when n e pairs, drawn from the edges, average between two steps: E[W] = I - L / (2 |E|)."""
    n = mixing.size
    if n == 1:
        return 0.0
    if isinstance(mixing, RelabelledMixing):
        slow = np.full(n - 1, 1 - 1 / (n - 1))
    else:
        adjacency = np.zeros((n, n))
        for round in range(mixing.period or SAMPLED_ROUNDS):
            adjacency += (mixing.sparse(round) > 0).toarray()
        np.fill_diagonal(adjacency, 0)
        laplacian = np.diag(adjacency.sum(axis=1)) - adjacency
        slow = 1 - np.linalg.eigvalsh(laplacian)[1:] / adjacency.sum()
    rho = np.clip(slow, 0, 1) ** (n * exchanges)
    return float((1 / (1 - rho)).sum() / n) if rho.max() < 1 - 1e-12 else None


def _super_learners(situation: Situation, times: Array) -> Iterator[Advice]:
    """Groups as learners: a group's step is its slowest member's and what its own allreduce and broadcast add."""
    g = situation.group_size
    inside = replace(
        situation,
        learners=g,
        group_size=1,
        bandwidth_Bps=situation.group_bandwidth_Bps or situation.bandwidth_Bps,
    )
    exposed = max(inside.allreduce_s() - BACKWARD_SHARE * situation.step_s, 0.0) + inside.model_s()
    grouped = times.reshape(ROUNDS, -1, g).max(axis=2) + exposed
    groups = replace(situation, learners=situation.learners // g, group_size=1)
    for row in _between(groups, grouped):
        yield replace(
            row,
            strategy=f"super-learner x{g}, {row.strategy}",
            steps_per_s=row.steps_per_s * g,
            # A group's gradient is a mean of g, so its noise has 1/g of the variance.
            stationary_variance=None if row.stationary_variance is None else row.stationary_variance / g,
        )
