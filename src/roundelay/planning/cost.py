"""What a round of a mixing costs on the wire (alpha-beta model: a message of b bytes takes latency + b / bandwidth)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundelay.topology.mixing import Mixing


@dataclass(frozen=True)
class RoundCost:
    """Cost of one round, mean over the rounds of a period.

    Attributes:
        mean_bytes: bytes sent by a learner, mean over learners.
        largest_bytes: bytes sent by the busiest learner (the hub of a star sends n - 1 models).
        messages: models sent in the whole world.
        seconds: until the busiest learner has sent its last model, one after the other over its own link.
    """

    mean_bytes: float
    largest_bytes: float
    messages: float
    seconds: float


def sends_per_round(mixing: Mixing) -> float:
    """Models sent per learner and round, mean over learners and rounds."""
    return float(np.mean([mixing.degrees(round).mean() for round in mixing.typical_rounds()]))


def sends_in(mixing: Mixing, rounds: int) -> float:
    """Models sent per learner in the first `rounds` rounds."""
    typical = mixing.typical_rounds()
    whole, rest = divmod(rounds, len(typical))
    begun = sum(float(mixing.degrees(round).mean()) for round in range(rest))
    return whole * len(typical) * sends_per_round(mixing) + begun


def round_cost(mixing: Mixing, model_bytes: float, bandwidth_Bps: float, latency_s: float) -> RoundCost:
    """Bytes, messages and time of a round for a model of `model_bytes`.

    >>> from roundelay.topology import ring
    >>> round_cost(ring(8), model_bytes=1e6, bandwidth_Bps=1e9, latency_s=1e-5)
    RoundCost(mean_bytes=2000000.0, largest_bytes=2000000.0, messages=16.0, seconds=0.00202)
    """
    mean = sends_per_round(mixing)
    busiest = float(np.mean([mixing.degrees(round).max() for round in mixing.typical_rounds()]))
    return RoundCost(
        mean_bytes=mean * model_bytes,
        largest_bytes=busiest * model_bytes,
        messages=mean * mixing.size,
        seconds=busiest * (latency_s + model_bytes / bandwidth_Bps),
    )
