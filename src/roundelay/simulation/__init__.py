"""Learners on a virtual clock: the strategies of the real world, without processes."""

from roundelay.simulation.learners import VirtualLearner, run

__all__ = ["VirtualLearner", "run"]
