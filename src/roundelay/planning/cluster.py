"""The cluster and the model that a plan is for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from roundelay.errors import ConfigError
from roundelay.simulation.network import Links
from roundelay.topology.mixing import DENSE_LIMIT, Array

ROUNDS = 60  # sampled steps per learner
BACKWARD_SHARE = 2 / 3  # of a step is the backward pass, behind which a reduction of gradients can hide
BUCKET_BYTES = 25e6  # the last bucket of gradients has no computation left to hide behind, as in DDP


@dataclass(frozen=True)
class Cluster:
    """Learners, their links, and the model that they train.

    A group is the learners of one machine: they share the machine's link to other machines, have faster links to each
    other, and may form one super-learner.

    Attributes:
        learners: number of learners.
        model_bytes: bytes of one model, which is what an exchange sends one way.
        step_s: mean compute time of a step.
        step_spread: standard deviation of a step's compute time / mean (lognormal).
        slowest_factor: how many times slower than the others the slowest learner is.
        bandwidth_Bps: bandwidth of a machine's link, in each direction.
        latency_s: latency of one message.
        group_size: learners per machine; 1 if each learner has a machine of its own.
        group_bandwidth_Bps: bandwidth of a learner's link inside its group; None for `bandwidth_Bps`.

    Raises ConfigError for values that no cluster has.
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
        for name in ("learners", "model_bytes", "step_s", "bandwidth_Bps", "group_size", "group_bandwidth_Bps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value}")
        if self.step_spread < 0 or self.latency_s < 0:
            raise ConfigError(f"step_spread and latency_s must be at least 0, got {self.step_spread}, {self.latency_s}")
        if self.slowest_factor < 1:
            raise ConfigError(
                f"slowest_factor must be at least 1 (1: as fast as the others), got {self.slowest_factor}"
            )
        if self.learners > DENSE_LIMIT:
            raise ConfigError(
                f"a plan is for at most {DENSE_LIMIT} learners, got {self.learners}; plan a smaller cluster"
            )
        if self.learners % self.group_size:
            raise ConfigError(f"group_size must divide the {self.learners} learners, got {self.group_size}")

    @property
    def links(self) -> Links:
        """The network, as the simulator models it."""
        inside_Bps = self.group_bandwidth_Bps or self.bandwidth_Bps
        return Links(self.latency_s, self.bandwidth_Bps, self.group_size, self.latency_s, inside_Bps)

    @property
    def allreduce_s(self) -> float:
        """Time of a ring allreduce of one model among all learners: a ring inside each group, one between groups."""
        return self.links.allreduce_s(self.model_bytes, range(self.learners))

    def exposed_s(self, reduction_s: float) -> float:
        """The part of a reduction of gradients that does not hide behind the backward pass."""
        last_bucket_s = reduction_s * min(1.0, BUCKET_BYTES / self.model_bytes)
        return max(reduction_s - BACKWARD_SHARE * self.step_s, last_bucket_s)

    def compute_times(self, seed: int = 0) -> Array:
        """Sampled compute times (ROUNDS, learners) in seconds. Each learner has exactly its mean; learner 0 is the slow one.

        A single learner is never slow.
        """
        sigma2 = np.log1p(self.step_spread**2)
        drawn = np.random.default_rng(seed).lognormal(0, np.sqrt(sigma2), (ROUNDS, self.learners))
        times = self.step_s * drawn / drawn.mean(axis=0)
        if self.learners > 1:
            times[:, 0] *= self.slowest_factor
        return np.asarray(times)

    def one_group(self) -> Cluster:
        """A single group on its own."""
        return replace(self, learners=self.group_size)

    def of_groups(self) -> Cluster:
        """Every group as one learner, which has the machine's link to itself."""
        return replace(self, learners=self.learners // self.group_size, group_size=1)
