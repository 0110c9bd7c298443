"""The strategies, one file each. None blocks or starts a thread: a strategy that must wait yields a future."""

from roundelay.strategies.adpsgd import ADPSGD
from roundelay.strategies.allreduce import Allreduce
from roundelay.strategies.base import Strategy
from roundelay.strategies.delay_by_one import DelayByOne
from roundelay.strategies.dpsgd import DPSGD
from roundelay.strategies.local_sgd import LocalSGD
from roundelay.strategies.super_learner import SuperLearner

__all__ = ["ADPSGD", "DPSGD", "Allreduce", "DelayByOne", "LocalSGD", "Strategy", "SuperLearner"]
