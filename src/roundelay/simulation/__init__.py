"""Learners on a virtual clock: the strategies of the real world, without processes."""

from roundelay.simulation.learners import VirtualLearner, run
from roundelay.simulation.stacked import StackedLearners

__all__ = ["StackedLearners", "VirtualLearner", "run"]
