"""Chunks: the samples of all epochs, in a shuffled order, cut into the pieces that steps use.

A *chunk* is the samples that one learner, or one group of learners, uses in one step. Chunks are numbered through all epochs.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Chunks:
    """The samples of every chunk. The order of epoch e is a permutation that depends only on (seed, e).

    The sizes of the chunks of an epoch differ by at most one sample. No chunk has more than `chunk` samples.

    Attributes:
        size: samples in an epoch.
        per_epoch: chunks in an epoch.

    >>> chunks = Chunks(samples=10, chunk=4, seed=0)
    >>> [len(chunks.samples(number)) for number in range(chunks.per_epoch)]
    [3, 3, 4]
    >>> chunks.samples_before(0), chunks.samples_before(3), chunks.samples_before(4)
    (0, 10, 13)
    """

    def __init__(self, samples: int, chunk: int, seed: int) -> None:
        self.size, self._seed = samples, seed
        self.per_epoch = -(-samples // chunk)
        self._order: tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None = None  # the last epoch used, and its order

    def _permutation(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self.size)
        return self._order[1]

    def samples_before(self, number: int) -> int:
        """How many samples all chunks before chunk `number` have together."""
        epoch, index = divmod(number, self.per_epoch)
        return epoch * self.size + index * self.size // self.per_epoch

    def samples(self, number: int, member: int = 0, members: int = 1) -> list[int]:
        """The samples of chunk `number`, or the share of one of the `members` of a group."""
        epoch, index = divmod(number, self.per_epoch)
        first, end = (i * self.size // self.per_epoch for i in (index, index + 1))
        chosen: list[int] = self._permutation(epoch)[first:end][member::members].tolist()
        return chosen
