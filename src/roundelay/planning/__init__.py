"""One cost model: which strategy and topology suit a cluster, and how training scales with learners."""

from roundelay.planning.advise import Advice, Situation, advise
from roundelay.planning.cost import RoundCost, round_cost

__all__ = ["Advice", "RoundCost", "Situation", "advise", "round_cost"]
