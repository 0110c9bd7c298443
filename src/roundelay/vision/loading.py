"""How fast a task's batches come out of worker processes, beside how fast they could if nothing had to be done for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

import torch
from torch.utils.data import DataLoader, Dataset

from roundelay.training.task import Batch, Task

AHEAD = 4  # batches that each worker prepares in advance, as a training run has it at most


@dataclass(frozen=True)
class LoadingSpeed:
    """Images per second.

    Attributes:
        images_per_s: read, decoded, augmented and handed over.
        limit_per_s: handed over only: the same workers give the same ready batch again and again.
    """

    images_per_s: float
    limit_per_s: float


class PreparedBatches(Dataset[Batch]):
    """Batch k is the samples from k `batch` on, in their order, prepared as in training with a generator seeded by k."""

    def __init__(self, task: Task, batch: int) -> None:
        self._task, self._batch = task, batch

    def __getitem__(self, number: int) -> Batch:
        samples = [(number * self._batch + position) % len(self._task) for position in range(self._batch)]
        return self._task.batch(samples, torch.Generator().manual_seed(number))


def loading_speed(task: Task, batch: int, workers: int, seconds: float = 3.0) -> LoadingSpeed:
    """Measure both for batches of that size and that many processes (0: in this one), for `seconds` each."""
    prepared = PreparedBatches(task, batch)
    return LoadingSpeed(
        _images_per_s(prepared, batch, workers, seconds), _images_per_s(_Ready(prepared[0]), batch, workers, seconds)
    )


class _Ready(Dataset[Batch]):
    """The same batch for every k; a copy, for what is handed to another process is moved to shared memory."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __getitem__(self, number: int) -> Batch:
        return tuple(tensor.clone() for tensor in self._batch)


def _images_per_s(batches: Dataset[Batch], batch: int, workers: int, seconds: float) -> float:
    """After the first batch of every worker, so that starting processes does not count."""
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=cast("torch.utils.data.Sampler[int]", range(1_000_000_000)),
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,  # as training runs have it, for they have threads
        prefetch_factor=AHEAD if workers else None,
    )
    iterator, count = iter(loader), 0
    for _ in range(workers * (AHEAD + 1) + 1):
        next(iterator)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        next(iterator)
        count += 1
    return count * batch / (time.perf_counter() - began)
