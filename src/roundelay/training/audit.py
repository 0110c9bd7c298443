"""Bookkeeping for experiments with faults: which chunks were used, and whether weights change only by updates.

An exchange conserves the sum of the weights over all learners. So at any time

    sum over living + sum over lost when they were lost = sum of initial weights + sum of updates + sum over joined

and an exchange that was lost or applied twice shows in these sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.training.metrics import JsonLines
from roundelay.weights import Flat


class Audit:
    """Sums over all weights of one learner: the sum at the beginning, and what the steps of this learner have added.

    Make the audit before the `Learner`. Then the audit's post-step hook runs before the learner's post-step hook, while
    the parameters still are the weights that exchanges change.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, path: Path) -> None:
        self._weights = [weight for weight in module.parameters() if weight.requires_grad]
        self._chunks = JsonLines(path)
        self._before = self._initial = self._updates = 0.0
        optimizer.register_step_post_hook(self._after)

    @contextlib.contextmanager
    def watching(self, optimizer: Optimizer) -> Iterator[None]:
        """Sum the updates of the steps in this block. The weights at its beginning count as the initial weights.

        Enter the block after the `Learner` is made. Then the audit's pre-step hook runs after the learner's,
        which brings the averaged weights in.
        """
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
        """Record in the file that this learner has taken a step on this chunk."""
        self._chunks.write(chunk)

    def figures(self, live: Flat | None) -> dict[str, float]:
        """The sums, for the metrics. `live`: the live weights; None if the module's own weights are the live ones."""
        now = _sum(self._weights if live is None else live.views)
        return {"sum_initial": self._initial, "sum_updates": self._updates, "sum_weights": now}

    def close(self) -> None:
        """Close the file of chunks."""
        self._chunks.close()


@torch.no_grad()
def _sum(weights: Iterable[Tensor]) -> float:
    return sum(float(weight.sum(dtype=torch.float64)) for weight in weights)
