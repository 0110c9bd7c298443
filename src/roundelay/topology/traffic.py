"""How many models the learners of a mixing send."""

from __future__ import annotations

import numpy as np

from roundelay.topology.mixing import Mixing


def sends_per_round(mixing: Mixing) -> float:
    """Models sent per learner and round, mean over learners and rounds."""
    return float(np.mean([mixing.degrees(round).mean() for round in mixing.typical_rounds()]))


def sends_in(mixing: Mixing, rounds: int) -> float:
    """Models sent per learner in the first `rounds` rounds, mean over learners."""
    typical = mixing.typical_rounds()
    periods, rest = divmod(rounds, len(typical))
    begun = sum(float(mixing.degrees(round).mean()) for round in range(rest))
    return periods * len(typical) * sends_per_round(mixing) + begun
