"""Mixing: the weights W_k with which learners average, one symmetric doubly stochastic matrix a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import networkx as nx
import numpy as np
import numpy.typing as npt
from scipy import sparse

from roundelay.errors import TopologyError
from roundelay.topology.permutation import permutation

Array = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int64]
Row = dict[int, float]
Entries = tuple[Ranks, Ranks, Array]  # index into the ranks asked for, peer, weight
Formula = Callable[[Ranks, int], Entries]

DENSE_LIMIT = 1024  # learners up to which an n x n matrix is built and solved without a second thought
SAMPLED_ROUNDS = 32  # of a random mixing, where all rounds are meant
TOLERANCE = 1e-9  # of a user's row sums, and of "exactly the mean"


class Mixing(ABC):
    r"""$W_k$: who averages with whom in round k, and how much; a pure value.

    Every $W_k$ is symmetric and doubly stochastic, so averaging keeps the mean of all learners and every exchange is
    mutual. A subclass says what one learner's row is; everything else follows from that.

    Attributes:
        name: what it is called on the command line.
        size: the number of learners n.
        period: after how many rounds the matrices repeat; 1 for a fixed W, None where every round is drawn anew.
        drift: relabelling i -> i + drift (mod n) turns every W_k into W_{k+1}; 0 where there is no such rule.
    """

    drift: int = 0

    def __init__(self, name: str, size: int, period: int | None) -> None:
        if size < 1:
            raise TopologyError(f"{name} needs at least 1 learner, got {size}")
        self.name = name
        self.size = size
        self.period = period

    @abstractmethod
    def row(self, rank: int, round: int = 0) -> Row:
        """W_k[rank, :] without its zeros, itself included, in ascending order of peers."""

    def neighbours(self, rank: int, round: int = 0) -> tuple[int, ...]:
        """Whom `rank` averages with in this round."""
        return tuple(peer for peer in self.row(rank, round) if peer != rank)

    def partner(self, rank: int, round: int = 0) -> int | None:
        """The one neighbour that an asynchronous learner calls in its own round: each in turn, None if it has none."""
        neighbours = self.neighbours(rank, round)
        turn = round // (self.period or 1)
        return neighbours[turn % len(neighbours)] if neighbours else None

    def checked(self, rank: int) -> int:
        """The rank, if there is such a learner."""
        if not 0 <= rank < self.size:
            raise TopologyError(f"{self!r} has learners 0 to {self.size - 1}, there is no learner {rank}")
        return rank

    def sparse(self, round: int = 0) -> sparse.csr_array:
        """W_k as a sparse matrix."""
        rows = [self.row(rank, round) for rank in range(self.size)]
        indptr = np.cumsum([0, *map(len, rows)])
        indices = np.fromiter((peer for row in rows for peer in row), np.int64, indptr[-1])
        weights = np.fromiter((weight for row in rows for weight in row.values()), np.float64, indptr[-1])
        return sparse.csr_array((weights, indices, indptr), shape=(self.size, self.size))

    def matrix(self, round: int = 0) -> Array:
        """W_k, dense."""
        return np.asarray(self.sparse(round).toarray())

    def apply(self, values: Array, round: int = 0) -> Array:
        """W_k X for X with one row a learner."""
        return np.asarray(self.sparse(round) @ values)

    def degrees(self, round: int = 0) -> Ranks:
        """How many neighbours each learner has in this round, which is also how many models it sends."""
        W = self.sparse(round)
        return np.asarray(np.diff(W.indptr) - (W.diagonal() != 0), dtype=np.int64)

    def typical_rounds(self) -> range:
        """Rounds that stand for all in what does not depend on the learners' names, such as degrees."""
        if self.drift:
            return range(1)
        return range(SAMPLED_ROUNDS if self.period is None else self.period)

    def blocks(self, round: int = 0) -> npt.NDArray[np.complex128] | Array | None:
        """Hermitian blocks, stacked (m, b, b), into which one unitary transform turns every W_k; block 0 has the mean.

        Symmetry makes them small (a circulant has n blocks of size 1, by FFT); without any, W_k itself is the one
        block. None where that would be too large to work with.
        """
        return self.matrix(round)[None] if self.size <= DENSE_LIMIT else None

    def __repr__(self) -> str:
        return f"{self.name}({self.size})"


class FormulaMixing(Mixing):
    """A mixing given by a formula for the entries of W_k in the rows of any learners: one, for a row, or all of them.

    Args:
        name: what it is called.
        size: the number of learners n.
        period: rounds after which it repeats.
        entries: (ranks, phase) -> (index into ranks, peer, weight) of all non-zero entries; phase = round mod period.
        shift: relabelling i -> i + shift (mod n) leaves every W_k as it is; None where it has no such symmetry.
        drift: relabelling i -> i + drift (mod n) turns every W_k into W_{k+1}; 0 where it has no such rule.
    """

    def __init__(
        self, name: str, size: int, period: int, entries: Formula, *, shift: int | None = None, drift: int = 0
    ) -> None:
        super().__init__(name, size, period)
        self._period, self._entries, self._shift, self.drift = period, entries, shift or size, drift

    def row(self, rank: int, round: int = 0) -> Row:
        """W_k[rank, :]."""
        _, peers, weights = self._entries(np.array([self.checked(rank)]), round % self._period)
        return dict(sorted(zip(peers.tolist(), weights.tolist(), strict=True)))

    def sparse(self, round: int = 0) -> sparse.csr_array:
        """W_k as a sparse matrix."""
        ranks, peers, weights = self._entries(np.arange(self.size), round % self._period)
        W = sparse.csr_array((weights, (ranks, peers)), shape=(self.size, self.size))
        W.sort_indices()
        return W

    def blocks(self, round: int = 0) -> npt.NDArray[np.complex128] | Array | None:
        """A block-circulant matrix falls into n/b blocks of size b by FFT over its first b rows."""
        b = self._shift
        if b == self.size:
            return super().blocks(round)
        first = np.zeros((b, self.size))
        ranks, peers, weights = self._entries(np.arange(b), round % self._period)
        first[ranks, peers] = weights
        return np.fft.fft(first.reshape(b, self.size // b, b), axis=1).transpose(1, 0, 2)


def joined(*parts: Entries) -> Entries:
    """The entries of several formulas together."""
    ranks, peers, weights = zip(*parts, strict=True)
    return np.concatenate(ranks), np.concatenate(peers), np.concatenate(weights)


def pairs(ranks: Ranks, peers: Ranks, resting: npt.NDArray[np.bool_]) -> Entries:
    """Each learner averages with one peer, 1/2 and 1/2; who rests keeps its own."""
    paired = np.flatnonzero(~resting)
    own = (np.arange(len(ranks)), ranks, np.where(resting, 1.0, 0.5))
    return joined(own, (paired, peers[paired], np.full(len(paired), 0.5)))


class MatrixMixing(Mixing):
    """A fixed mixing given by its matrix, checked to be symmetric, doubly stochastic and connected."""

    def __init__(self, name: str, weights: npt.ArrayLike | sparse.sparray) -> None:
        W = sparse.csr_array(weights if sparse.issparse(weights) else _square(name, weights))
        super().__init__(name, W.shape[0], period=1)
        _check_doubly_stochastic(name, W)
        W.eliminate_zeros()
        W.sort_indices()
        self._W = W

    def row(self, rank: int, round: int = 0) -> Row:
        """W[rank, :]."""
        start, stop = self._W.indptr[self.checked(rank) : rank + 2]
        return dict(zip(self._W.indices[start:stop].tolist(), self._W.data[start:stop].tolist(), strict=True))

    def sparse(self, round: int = 0) -> sparse.csr_array:
        """W itself."""
        return self._W


class RelabelledMixing(Mixing):
    r"""A fixed mixing whose learners change places at random every round: $W_k = P_k^T W P_k$.

    The same bytes as the fixed one, but in expectation everyone meets everyone: this is the randomised mixing of
    arXiv:2002.01119. The permutation of round k is a pure function of (seed, k).
    """

    def __init__(self, name: str, base: Mixing, seed: int) -> None:
        super().__init__(name, base.size, period=None)
        self.base, self.seed = base, seed

    def row(self, rank: int, round: int = 0) -> Row:
        """W_k[rank, :] in O(degree)."""
        places = permutation(self.size, self.seed, round)
        row = self.base.row(places.inverse(self.checked(rank)))
        return dict(sorted((places(position), weight) for position, weight in row.items()))

    def partner(self, rank: int, round: int = 0) -> int | None:
        """The same neighbour by place every round (on a ring: the successor); the places are new each time."""
        places = permutation(self.size, self.seed, round)
        position = self.base.partner(places.inverse(self.checked(rank)))
        return None if position is None else places(position)

    def sparse(self, round: int = 0) -> sparse.csr_array:
        """W_k as a sparse matrix."""
        W = self.base.sparse().tocoo()
        learner = permutation(self.size, self.seed, round).all()
        return sparse.csr_array((W.data, (learner[W.row], learner[W.col])), shape=W.shape)

    def apply(self, values: Array, round: int = 0) -> Array:
        """W_k X: take places, mix, go home."""
        learner = permutation(self.size, self.seed, round).all()
        mixed = np.empty_like(values)
        mixed[learner] = self.base.apply(values[learner])
        return mixed

    def degrees(self, round: int = 0) -> Ranks:
        """Those of the fixed mixing, in other places: changing places costs nothing."""
        degrees = np.empty(self.size, dtype=np.int64)
        degrees[permutation(self.size, self.seed, round).all()] = self.base.degrees()
        return degrees

    def typical_rounds(self) -> range:
        """One: only the learners' places change."""
        return range(1)

    def blocks(self, round: int = 0) -> npt.NDArray[np.complex128] | Array | None:
        """Rounds share no transform; the spectrum of a relabelled mixing has a closed form instead."""
        return None


def metropolis(graph: nx.Graph) -> sparse.csr_array:
    r"""Metropolis weights: $w_{ij} = 1 / (1 + \max(d_i, d_j))$ on edges, the rest on the diagonal.

    Symmetric and doubly stochastic on any graph, and computable from the degrees of two neighbours alone.

    >>> import networkx as nx
    >>> metropolis(nx.path_graph(3)).toarray().round(3).tolist()
    [[0.667, 0.333, 0.0], [0.333, 0.333, 0.333], [0.0, 0.333, 0.667]]
    """
    ends = sparse.csr_array(nx.to_scipy_sparse_array(graph, weight=None, dtype=np.float64))
    ends.setdiag(0)
    ends.eliminate_zeros()
    degree = np.diff(ends.indptr)
    edges = ends.tocoo()
    weights = 1.0 / (1 + np.maximum(degree[edges.row], degree[edges.col]))
    W = sparse.coo_array((weights, (edges.row, edges.col)), shape=ends.shape).tocsr()
    return sparse.csr_array(W + sparse.diags_array(1 - W.sum(axis=1)))


def _square(name: str, weights: npt.ArrayLike) -> Array:
    try:
        W = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TopologyError(f"{name}: a mixing matrix has numbers as entries, but {error}") from error
    if W.ndim != 2 or W.shape[0] != W.shape[1]:
        raise TopologyError(f"{name}: a mixing matrix is square, got shape {W.shape}")
    if not np.isfinite(W).all():
        raise TopologyError(f"{name}: a mixing matrix has finite entries only, got NaN or infinity")
    return W


def _check_doubly_stochastic(name: str, W: sparse.csr_array) -> None:
    if W.nnz and W.data.min() < 0:
        raise TopologyError(f"{name}: a mixing matrix has no negative entries, got {W.data.min():.6g}")
    if abs(W - W.T).max() > TOLERANCE:
        raise TopologyError(f"{name}: a mixing matrix is symmetric, so that exchanges are mutual; this one is not")
    sums = W.sum(axis=1)
    worst = int(np.argmax(np.abs(sums - 1)))
    if abs(sums[worst] - 1) > TOLERANCE:
        raise TopologyError(
            f"{name}: a mixing matrix is doubly stochastic, but row {worst} sums to {sums[worst]:.6g} instead of 1"
        )
    parts, _ = sparse.csgraph.connected_components(W, directed=False)
    if parts > 1:
        raise TopologyError(f"{name}: the graph falls into {parts} parts that never average; add edges between them")
