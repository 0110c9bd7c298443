"""Mixings on Cayley graphs of abelian groups: rings, tori, hypercubes, complete and exponential graphs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from roundelay.topology.mixing import Array, Mixing, Ranks, Row

ROLL_LIMIT = 64  # neighbours up to which adding rolled copies beats a Fourier transform


class CayleyMixing(Mixing):
    r"""Learner g of the group $Z_{n_1} \times \dots \times Z_{n_d}$ averages with g + s for every offset s of a round.

    Regular, so the Metropolis weight of every edge is 1 / (1 + degree); the Fourier transform of one row gives all
    eigenvalues, $\lambda_k = \sum_s w_s \cos(2\pi \sum_j k_j s_j / n_j)$, so that 100,000 learners are no effort.

    Args:
        name: what it is called.
        shape: (n_1, ..., n_d); learners are numbered in row-major order.
        phases: the offsets of each round of one period; -s must be there with s. Zero and repetitions are dropped.
    """

    def __init__(self, name: str, shape: tuple[int, ...], phases: Sequence[Collection[tuple[int, ...]]]) -> None:
        super().__init__(name, math.prod(shape), len(phases))
        self.shape = shape
        self._offsets = [_distinct(offsets, shape) for offsets in phases]

    def _phase(self, round: int) -> Ranks:
        return self._offsets[round % len(self._offsets)]

    def _peers(self, rank: int, round: int) -> Ranks:
        """Peers in the order of the offsets: on a ring, successor then predecessor."""
        place = np.array(np.unravel_index(self.checked(rank), self.shape), dtype=np.int64)
        moved = (place + self._phase(round)) % np.array(self.shape)
        return np.asarray(np.ravel_multi_index(tuple(moved.T), self.shape), dtype=np.int64)

    def row(self, rank: int, round: int = 0) -> Row:
        """W_k[rank, :]: 1 / (1 + degree) for itself and every neighbour."""
        peers = np.sort(np.append(self._peers(rank, round), rank))
        return dict.fromkeys(peers.tolist(), 1.0 / len(peers))

    def partner(self, rank: int, round: int = 0) -> int | None:
        """Neighbours in the order of the offsets, each in turn: on a ring successor and predecessor alternate."""
        peers = self._peers(rank, round)
        return int(peers[round // len(self._offsets) % len(peers)]) if len(peers) else None

    def apply(self, values: Array, round: int = 0) -> Array:
        """W_k X as a mean of rolled copies, or in Fourier space where neighbours are many."""
        offsets, axes = self._phase(round), tuple(range(len(self.shape)))
        grid = values.reshape(*self.shape, -1)
        if len(offsets) <= ROLL_LIMIT:
            mixed = grid + sum(np.roll(grid, offset.tolist(), axes) for offset in offsets)
            return np.asarray(mixed / (1 + len(offsets))).reshape(values.shape)
        eigenvalues = self._eigenvalues(round)[..., None]
        return np.fft.ifftn(eigenvalues * np.fft.fftn(grid, axes=axes), axes=axes).real.reshape(values.shape)

    def degrees(self, round: int = 0) -> Ranks:
        """The same for everyone."""
        return np.full(self.size, len(self._phase(round)))

    def _eigenvalues(self, round: int) -> Array:
        first = np.zeros(self.shape)
        first[tuple(self._phase(round).T)] = 1
        first[(0,) * len(self.shape)] = 1
        return np.fft.fftn(first / first.sum()).real

    def blocks(self, round: int = 0) -> Array:
        """As many blocks as learners, of size 1: the eigenvalues, the mean's first."""
        return self._eigenvalues(round).reshape(-1, 1, 1)


def _distinct(offsets: Collection[tuple[int, ...]], shape: tuple[int, ...]) -> Ranks:
    """Offsets reduced modulo the shape, without zero and repetitions, in the order given."""
    reduced = np.array(list(offsets), dtype=np.int64).reshape(-1, len(shape)) % np.array(shape)
    kept = dict.fromkeys(map(tuple, reduced[reduced.any(axis=1)].tolist()))
    return np.array(list(kept), dtype=np.int64).reshape(-1, len(shape))
