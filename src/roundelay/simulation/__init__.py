"""Learners on a virtual clock: the same strategy classes as in real runs, in one process."""

from roundelay.simulation.learners import VirtualLearner, run, start
from roundelay.simulation.stacked import StackedLearners

__all__ = ["StackedLearners", "VirtualLearner", "run", "start"]
