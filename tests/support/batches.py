"""Batches of a task, numbered, for the worker processes of a DataLoader."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from roundelay.training.task import Batch, Task


class NumberedBatches(Dataset[Batch]):
    """Batch k has the samples from k·size on, prepared as in training with a generator seeded by k."""

    def __init__(self, task: Task, size: int) -> None:
        self._task, self._size = task, size

    def __getitem__(self, number: int) -> Batch:
        samples = [(number * self._size + position) % len(self._task) for position in range(self._size)]
        return self._task.batch(samples, torch.Generator().manual_seed(number))
