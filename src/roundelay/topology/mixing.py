"""Mixing: the weights W_k with which learners average in round k, a symmetric doubly stochastic matrix per round."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from roundelay.errors import TopologyError
from roundelay.topology.permutation import permutation

Array = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int64]
Row = dict[int, float]
Entries = tuple[Ranks, Ranks, Array]
"""Non-zero entries of a matrix as three arrays: row, column, weight."""
Formula = Callable[[Ranks, int], Entries]

DENSE_LIMIT = 1024  # the largest number of learners for which a dense n x n matrix is built and solved
SAMPLED_ROUNDS = 32  # rounds of a random mixing that stand for all rounds
TOLERANCE = 1e-9  # allowed error of a user's row sums, and of "equal to the mean"


class Mixing(ABC):
    r"""$W_k$: which learners average with each other in round k, and with which weights. A pure value.

    Every $W_k$ is symmetric and doubly stochastic, so averaging keeps the mean of all learners, and every exchange is
    mutual. A subclass defines `row`; every other method follows from `row`.

    Attributes:
        name: its name on the command line.
        size: the number of learners n.
        period: the number of rounds after which the matrices repeat; 1 for a fixed W, None if every round is random.
        drift: relabelling i -> i + drift (mod n) turns every W_k into W_{k+1}; 0 if there is no such rule.
    """

    drift: int = 0

    def __init__(self, name: str, size: int, period: int | None) -> None:
        try:
            operator.index(size)
        except TypeError:
            raise TopologyError(f"{name} needs a whole number of learners, got {size!r}") from None
        if size < 1:
            raise TopologyError(f"{name} needs at least 1 learner, got {size}")
        self.name = name
        self.size = size
        self.period = period

    @abstractmethod
    def row(self, rank: int, round: int = 0) -> Row:
        """Non-zero entries of W_k[rank, :] as {peer: weight}, with the learner's own weight, in ascending order of peers."""

    def neighbours(self, rank: int, round: int = 0) -> tuple[int, ...]:
        """The peers that `rank` averages with in this round, in ascending order."""
        return tuple(peer for peer in self.row(rank, round) if peer != rank)

    def partner(self, rank: int, round: int = 0) -> int | None:
        """The one neighbour that an asynchronous learner calls in its own round k; None if it has no neighbour.

        The neighbours of a fixed graph take turns.
        """
        neighbours = self.neighbours(rank, round)
        turn = round // (self.period or 1)
        return neighbours[turn % len(neighbours)] if neighbours else None

    def checked(self, rank: int) -> int:
        """`rank` itself. Raises TopologyError if there is no such learner."""
        if not 0 <= rank < self.size:
            raise TopologyError(f"{self!r} has learners 0 to {self.size - 1}, there is no learner {rank}")
        return rank

    def entries(self, round: int = 0) -> Entries:
        """All non-zero entries of W_k: rank, peer, weight; sorted by rank, then by peer."""
        rows = [self.row(rank, round) for rank in range(self.size)]
        ranks = np.repeat(np.arange(self.size), [len(row) for row in rows])
        peers = np.fromiter((peer for row in rows for peer in row), np.int64, len(ranks))
        weights = np.fromiter((weight for row in rows for weight in row.values()), np.float64, len(ranks))
        return ranks, peers, weights

    def matrix(self, round: int = 0) -> Array:
        """W_k as a dense (n, n) array."""
        ranks, peers, weights = self.entries(round)
        W = np.zeros((self.size, self.size))
        W[ranks, peers] = weights
        return W

    def apply(self, values: Array, round: int = 0) -> Array:
        """W_k X, where row i of X belongs to learner i."""
        ranks, peers, weights = self.entries(round)
        products = weights.reshape(-1, *(1,) * (values.ndim - 1)) * values[peers]
        return np.asarray(np.add.reduceat(products, np.searchsorted(ranks, np.arange(self.size))))

    def degrees(self, round: int = 0) -> Ranks:
        """The number of neighbours of each learner in this round; each learner sends as many models."""
        ranks, peers, _ = self.entries(round)
        return np.bincount(ranks[ranks != peers], minlength=self.size)

    def typical_rounds(self) -> range:
        """Rounds that represent all rounds for figures that do not depend on the ranks, such as the mean degree."""
        if self.drift:
            return range(1)
        return range(SAMPLED_ROUNDS if self.period is None else self.period)

    def blocks(self, round: int = 0) -> npt.NDArray[np.complex128] | Array | None:
        """W_k as Hermitian blocks on the diagonal, stacked as (m, b, b). The mean of all learners belongs to block 0.

        The unitary transform that makes these blocks is the same for every round. Symmetry makes the blocks small: the
        FFT of a circulant matrix gives n blocks of size 1. Without any symmetry W_k itself is the only block. The answer
        is None if that block would have more than DENSE_LIMIT rows.
        """
        return self.matrix(round)[None] if self.size <= DENSE_LIMIT else None

    def __repr__(self) -> str:
        return f"{self.name}({self.size})"


class FormulaMixing(Mixing):
    """A periodic mixing given by a formula for the entries of any rows of W_k.

    Args:
        name: its name.
        size: the number of learners n.
        period: the number of rounds after which the mixing repeats.
        formula: (ranks, phase) -> (index into ranks, peer, weight) of all non-zero entries, where phase = round mod period.
        shift: relabelling i -> i + shift (mod n) does not change any W_k; None if there is no such symmetry.
        drift: relabelling i -> i + drift (mod n) turns every W_k into W_{k+1}; 0 if there is no such rule.
    """

    def __init__(
        self, name: str, size: int, period: int, formula: Formula, *, shift: int | None = None, drift: int = 0
    ) -> None:
        super().__init__(name, size, period)
        self._period, self._formula, self._shift, self.drift = period, formula, shift or size, drift

    def row(self, rank: int, round: int = 0) -> Row:
        _, peers, weights = self._formula(np.array([self.checked(rank)]), round % self._period)
        return dict(sorted(zip(peers.tolist(), weights.tolist(), strict=True)))

    def entries(self, round: int = 0) -> Entries:
        return in_order(*self._formula(np.arange(self.size), round % self._period))

    def blocks(self, round: int = 0) -> npt.NDArray[np.complex128] | Array | None:
        """The FFT over the first b rows of a block-circulant matrix gives n/b blocks of size b."""
        b = self._shift
        if b == self.size:
            return super().blocks(round)
        first = np.zeros((b, self.size))
        ranks, peers, weights = self._formula(np.arange(b), round % self._period)
        first[ranks, peers] = weights
        return np.fft.fft(first.reshape(b, self.size // b, b), axis=1).transpose(1, 0, 2)


def in_order(ranks: Ranks, peers: Ranks, weights: Array) -> Entries:
    """The same entries, sorted by rank, then by peer."""
    order = np.lexsort((peers, ranks))
    return ranks[order], peers[order], weights[order]


def joined(*parts: Entries) -> Entries:
    """The entries of several parts together, in the order given."""
    ranks, peers, weights = zip(*parts, strict=True)
    return np.concatenate(ranks), np.concatenate(peers), np.concatenate(weights)


def pairs(ranks: Ranks, peers: Ranks, resting: npt.NDArray[np.bool_]) -> Entries:
    """Entries of pairs that average with 1/2 and 1/2; a resting learner keeps its own weights."""
    paired = np.flatnonzero(~resting)
    own = (np.arange(len(ranks)), ranks, np.where(resting, 1.0, 0.5))
    return joined(own, (paired, peers[paired], np.full(len(paired), 0.5)))


class RelabelledMixing(Mixing):
    r"""A fixed mixing over a fresh random permutation of the learners every round: $W_k = P_k^T W P_k$.

    It sends as many bytes as the fixed mixing, but in expectation every learner averages with every other one: the
    randomised mixing of arXiv:2002.01119. The permutation of round k is a pure function of (seed, k). A learner's
    *position* is where the permutation puts it in the fixed mixing.
    """

    def __init__(self, name: str, base: Mixing, seed: int) -> None:
        super().__init__(name, base.size, period=None)
        self.base, self.seed = base, seed

    def row(self, rank: int, round: int = 0) -> Row:
        """W_k[rank, :] in O(degree)."""
        learner = permutation(self.size, self.seed, round)
        row = self.base.row(learner.inverse(self.checked(rank)))
        return dict(sorted((learner(position), weight) for position, weight in row.items()))

    def partner(self, rank: int, round: int = 0) -> int | None:
        """The first partner in the fixed mixing: on a ring, the successor in this round's permutation."""
        learner = permutation(self.size, self.seed, round)
        position = self.base.partner(learner.inverse(self.checked(rank)))
        return None if position is None else learner(position)

    def entries(self, round: int = 0) -> Entries:
        ranks, peers, weights = self.base.entries()
        learner = permutation(self.size, self.seed, round).all()
        return in_order(learner[ranks], learner[peers], weights)

    def apply(self, values: Array, round: int = 0) -> Array:
        """W_k X = P_k^T W P_k X."""
        learner = permutation(self.size, self.seed, round).all()
        mixed = np.empty_like(values)
        mixed[learner] = self.base.apply(values[learner])
        return mixed

    def degrees(self, round: int = 0) -> Ranks:
        degrees = np.empty(self.size, dtype=np.int64)
        degrees[permutation(self.size, self.seed, round).all()] = self.base.degrees()
        return degrees

    def typical_rounds(self) -> range:
        """One round, because rounds differ only by a permutation."""
        return range(1)

    def blocks(self, round: int = 0) -> npt.NDArray[np.complex128] | Array | None:
        """None: no single transform serves all rounds. The spectrum has a closed form instead."""
        return None
