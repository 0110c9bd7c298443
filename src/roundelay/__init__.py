"""Roundelay: decentralised data-parallel SGD for PyTorch.

Each learner keeps its own weights and averages them with a few neighbours instead of waiting for a global allreduce.
Names are imported when first used, so that commands which need no torch start fast. A new name is added here and to the
stub beside this file, which type checkers and editors read.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_NAMES = {
    "roundelay.errors": ["PeerLostError", "RoundelayError", "StrategyError", "TopologyError"],
    "roundelay.cluster.elastic_world": ["Rendezvous", "join"],
    "roundelay.cluster.environment": ["World", "init"],
    "roundelay.cluster.ticket": ["Ticket"],
    "roundelay.learner": ["Learner"],
    "roundelay.sampler": ["ElasticSampler"],
    "roundelay.strategies": ["ADPSGD", "Allreduce", "DPSGD", "DelayByOne", "LocalSGD", "Strategy", "SuperLearner"],
    "roundelay.training.task": ["Task", "TaskConfig"],
    "roundelay.topology": [
        "Mixing",
        "base_graph",
        "complete",
        "exponential",
        "from_graph",
        "from_matrix",
        "hypercube",
        "odd_even_ring",
        "one_peer_exponential",
        "random_matching",
        "random_ring",
        "ring",
        "spectral_gap",
        "spectrum",
        "star",
        "torus",
    ],
    "roundelay.weights": ["whole_state"],
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - one list of names, not two that drift apart


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'roundelay' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
