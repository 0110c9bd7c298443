"""The papers' published training times beside those of the model."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.planning.cluster import Cluster
from roundelay.planning.models import MODELS, step_cost
from roundelay.topology import random_ring

# The papers' setting: V100 GPUs in machines of 4, 100 Gb/s between machines; 16 epochs of 2,000 hours of speech, with
# 100 frames per second, in windows of 21 frames.
MODEL_BYTES = 164.6 * 2**20
SAMPLES = 16 * 2000 * 3600 * 100 / 21
GROUP_SIZE = 4

SETTING = (
    "Fitted: the compute time of a sample on one GPU, once per system, to the rows marked 'fitted'. Not fitted: a model of "
    "164.6 MiB, 100 Gb/s and 5 us between machines of 4 GPUs, 50 GB/s inside, step times with a spread of 10 %, 16 epochs "
    "of 2,000 hours in windows of 21 frames, super-learners of one machine with adpsgd on a random ring between them. "
    "Which batch belongs to which number of GPUs is our reading of the papers."
)


@dataclass(frozen=True)
class Published:
    """Hours that a paper has published, with the number of GPUs and the global batch; whether the model is fitted to them."""

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


@dataclass(frozen=True)
class Comparison:
    """A published row beside the model's hours, from a compute time of `sample_s` per sample."""

    system: str
    learners: int
    batch: int
    published_h: float
    predicted_h: float
    fitted: bool
    sample_s: float


def comparisons() -> list[Comparison]:
    """All published rows. One number per system, the compute time of a sample, is fitted to the system's first row."""
    found = []
    sample_s = 0.0
    for row in PUBLISHED:
        if row.fitted:
            sample_s = fitted_sample_s(row)
        predicted_h = training_h(sample_s, row.learners, row.batch)
        found.append(Comparison(row.system, row.learners, row.batch, row.hours, predicted_h, row.fitted, sample_s))
    return found


def training_h(sample_s: float, learners: int, batch: int) -> float:
    """Predicted hours of the whole training, if one GPU computes a sample in `sample_s`."""
    cluster = Cluster(
        learners,
        MODEL_BYTES,
        step_s=sample_s * batch / learners,
        bandwidth_Bps=12.5e9,
        latency_s=5e-6,
        group_size=GROUP_SIZE,
        group_bandwidth_Bps=50e9,
    )
    cost = step_cost(MODELS["adpsgd"], random_ring(learners // GROUP_SIZE), cluster, GROUP_SIZE)
    return SAMPLES / batch * learners / cost.steps_per_s / 3600


def fitted_sample_s(published: Published) -> float:
    """The compute time of a sample with which the model gives the published hours, by bisection."""
    low, high = 1e-7, 1.0
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        too_slow = training_h(middle, published.learners, published.batch) > published.hours
        low, high = (low, middle) if too_slow else (middle, high)
    return float((low * high) ** 0.5)
