"""Bookkeeping for experiments with faults: which chunks were used, and whether weights come only from updates.

Exchanges conserve the sum over learners (DESIGN: sum of living + sum of dead at death = sum of initial + sum of updates + sum of
joined), so with the sums of all elements written down every lost or doubled exchange shows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.weights.replica import Flat


class Audit:
    """Sums over all weights of one learner: what it began with, what its steps have added.

    To be made before the learner: its hook after a step must come first, to see the weights that exchanges act on.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, path: Path) -> None:
        self._weights = [weight for weight in module.parameters() if weight.requires_grad]
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._before = self._initial = self._updates = 0.0
        optimizer.register_step_post_hook(self._after)

    @contextlib.contextmanager
    def watching(self, optimizer: Optimizer) -> Iterator[None]:
        """Count from here, with weights that no step of this learner has made; its hook before a step is there already."""
        self._initial, self._updates = _sum(self._weights), 0.0
        hook = optimizer.register_step_pre_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        self._before = _sum(self._weights)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        self._updates += _sum(self._weights) - self._before

    def used(self, chunk: int) -> None:
        """A chunk is part of the weights."""
        os.write(self._file, f"{chunk}\n".encode())

    def figures(self, live: Flat | None) -> dict[str, float]:
        """For the metrics; `live` are the weights where they are not the module's own."""
        now = _sum(self._weights if live is None else live.views)
        return {"sum_initial": self._initial, "sum_updates": self._updates, "sum_weights": now}

    def close(self) -> None:
        """No more."""
        os.close(self._file)


@torch.no_grad()
def _sum(weights: Iterable[Tensor]) -> float:
    return sum(float(weight.sum(dtype=torch.float64)) for weight in weights)
