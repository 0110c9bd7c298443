"""Mixings on Cayley graphs of abelian groups: rings, tori, hypercubes, complete and exponential graphs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from roundelay.topology.mixing import Array, Entries, Mixing, Ranks, Row

ROLL_LIMIT = 64  # with more neighbours a Fourier transform is faster than adding rolled copies


class CayleyMixing(Mixing):
    r"""Learner g of the group $Z_{n_1} \times \dots \times Z_{n_d}$ averages with g + s for every offset s of a round.

    The graph is regular, so every edge has the Metropolis weight 1 / (1 + degree). The Fourier transform of one row gives
    all eigenvalues, $\lambda_k = \sum_s w_s \cos(2\pi \sum_j k_j s_j / n_j)$, so 100,000 learners take a fraction of a
    second.

    Args:
        name: its name.
        shape: (n_1, ..., n_d); learners are numbered in row-major order.
        phases: the offsets of each round of one period. With s there must be -s. Zero and repetitions are dropped.
    """

    def __init__(self, name: str, shape: tuple[int, ...], phases: Sequence[Collection[tuple[int, ...]]]) -> None:
        super().__init__(name, math.prod(shape), len(phases))
        self.shape = shape
        self._offsets = [_distinct(offsets, shape) for offsets in phases]

    def _phase(self, round: int) -> Ranks:
        return self._offsets[round % len(self._offsets)]

    def _peers(self, ranks: Ranks, round: int) -> Ranks:
        """Peers (len(ranks), degree) in the order of the offsets: on a ring, successor then predecessor."""
        coordinates = np.stack(np.unravel_index(ranks, self.shape), axis=-1)
        moved = (coordinates[:, None] + self._phase(round)) % np.array(self.shape)
        return np.asarray(np.ravel_multi_index(tuple(np.moveaxis(moved, -1, 0)), self.shape), dtype=np.int64)

    def row(self, rank: int, round: int = 0) -> Row:
        peers = np.sort(np.append(self._peers(np.array([self.checked(rank)]), round)[0], rank))
        return dict.fromkeys(peers.tolist(), 1.0 / len(peers))

    def entries(self, round: int = 0) -> Entries:
        every = np.arange(self.size)
        peers = np.sort(np.column_stack([self._peers(every, round), every]), axis=1)
        return every.repeat(peers.shape[1]), peers.ravel(), np.full(peers.size, 1.0 / peers.shape[1])

    def partner(self, rank: int, round: int = 0) -> int | None:
        """The neighbours take turns in the order of the offsets: on a ring, successor and predecessor alternate."""
        [peers] = self._peers(np.array([self.checked(rank)]), round)
        return int(peers[round // len(self._offsets) % len(peers)]) if len(peers) else None

    def apply(self, values: Array, round: int = 0) -> Array:
        """W_k X as a mean of rolled copies, or in Fourier space if there are many neighbours."""
        offsets, axes = self._phase(round), tuple(range(len(self.shape)))
        grid = values.reshape(*self.shape, -1)
        if len(offsets) <= ROLL_LIMIT:
            mixed = grid + sum(np.roll(grid, offset.tolist(), axes) for offset in offsets)
            return np.asarray(mixed / (1 + len(offsets))).reshape(values.shape)
        eigenvalues = self._eigenvalues(round)[..., None]
        return np.fft.ifftn(eigenvalues * np.fft.fftn(grid, axes=axes), axes=axes).real.reshape(values.shape)

    def degrees(self, round: int = 0) -> Ranks:
        return np.full(self.size, len(self._phase(round)))

    def _eigenvalues(self, round: int) -> Array:
        first = np.zeros(self.shape)
        first[tuple(self._phase(round).T)] = 1
        first[(0,) * len(self.shape)] = 1
        return np.fft.fftn(first / first.sum()).real

    def blocks(self, round: int = 0) -> Array:
        """The n eigenvalues as blocks of size 1; the mean's eigenvalue comes first."""
        return self._eigenvalues(round).reshape(-1, 1, 1)


def _distinct(offsets: Collection[tuple[int, ...]], shape: tuple[int, ...]) -> Ranks:
    """Offsets modulo the shape, without zero and repetitions, in the order given."""
    reduced = np.array(list(offsets), dtype=np.int64).reshape(-1, len(shape)) % np.array(shape)
    kept = dict.fromkeys(map(tuple, reduced[reduced.any(axis=1)].tolist()))
    return np.array(list(kept), dtype=np.int64).reshape(-1, len(shape))
