"""One cost model: which strategy and topology suit a cluster, and how training scales with the number of learners."""

from roundelay.planning.cluster import Cluster
from roundelay.planning.ranking import Candidate, best_of_each, ranking
from roundelay.planning.scaling import ScalingPoint, scaling

__all__ = ["Candidate", "Cluster", "ScalingPoint", "best_of_each", "ranking", "scaling"]
