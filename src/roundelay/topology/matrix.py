"""Fixed mixings from a user's matrix or graph, checked before use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from roundelay.errors import TopologyError
from roundelay.topology.mixing import TOLERANCE, Array, Entries, Mixing, Ranks, Row, in_order

if TYPE_CHECKING:
    import networkx as nx


def from_matrix(weights: npt.ArrayLike, name: str = "matrix") -> Mixing:
    """Any symmetric doubly stochastic matrix of a connected graph.

    Raises TopologyError that says which property is missing.

    >>> from_matrix([[0.5, 0.5], [0.5, 0.4]])
    Traceback (most recent call last):
    roundelay.errors.TopologyError: matrix: a mixing matrix is doubly stochastic, but row 1 sums to 0.9 instead of 1
    """
    W = _square(name, weights)
    _check_doubly_stochastic(name, W)
    ranks, peers = np.nonzero(W)
    return MatrixMixing(name, len(W), (ranks, peers, W[ranks, peers]))


def from_graph(graph: nx.Graph, name: str = "graph") -> Mixing:
    r"""Any connected undirected networkx graph, with Metropolis weights $w_{ij} = 1 / (1 + \max(d_i, d_j))$.

    Metropolis weights are symmetric and doubly stochastic on every graph. Learners are the nodes in the graph's order.

    Raises TopologyError if the graph is directed, empty or not connected.

    >>> import networkx as nx
    >>> from_graph(nx.petersen_graph()).row(0)
    {0: 0.25, 1: 0.25, 4: 0.25, 5: 0.25}
    """
    if graph.is_directed():
        raise TopologyError(f"{name}: exchanges are mutual, got a directed graph; use graph.to_undirected()")
    if not graph:
        raise TopologyError(f"{name} needs at least 1 learner, got an empty graph")
    return MatrixMixing(name, len(graph), _metropolis(graph))


class MatrixMixing(Mixing):
    """A fixed mixing given by the sorted non-zero entries of a symmetric doubly stochastic matrix.

    Raises TopologyError if the graph of these entries is not connected.
    """

    def __init__(self, name: str, size: int, entries: Entries) -> None:
        super().__init__(name, size, period=1)
        ranks, peers, _ = self._entries = entries
        parts = _count_parts(size, ranks, peers)
        if parts > 1:
            raise TopologyError(
                f"{name}: the graph falls into {parts} parts that never average; add edges between them"
            )
        self._starts = np.searchsorted(ranks, np.arange(size + 1))

    def row(self, rank: int, round: int = 0) -> Row:
        own = slice(*self._starts[self.checked(rank) : rank + 2])
        _, peers, weights = self._entries
        return dict(zip(peers[own].tolist(), weights[own].tolist(), strict=True))

    def entries(self, round: int = 0) -> Entries:
        return self._entries


def _metropolis(graph: nx.Graph) -> Entries:
    rank_of = {node: rank for rank, node in enumerate(graph)}
    edges = [(rank_of[a], rank_of[b]) for a, b in graph.edges() if a != b]
    one_way = np.array(edges, dtype=np.int64).reshape(-1, 2)
    ranks, peers = np.unique(np.concatenate([one_way, one_way[:, ::-1]]), axis=0).T
    degree = np.bincount(ranks, minlength=len(graph))
    weights = 1.0 / (1 + np.maximum(degree[ranks], degree[peers]))
    own = 1 - np.bincount(ranks, weights, minlength=len(graph))
    every = np.arange(len(graph))
    return in_order(np.concatenate([ranks, every]), np.concatenate([peers, every]), np.concatenate([weights, own]))


def _count_parts(size: int, ranks: Ranks, peers: Ranks) -> int:
    """Number of connected components: every learner takes the smallest label near it until nothing changes."""
    label = np.arange(size)
    while True:
        smallest = label.copy()
        np.minimum.at(smallest, ranks, label[peers])
        smallest = smallest[smallest]  # a label's own label is smaller still, so that long paths take few passes
        if (smallest == label).all():
            return len(np.unique(label))
        label = smallest


def _square(name: str, weights: npt.ArrayLike) -> Array:
    try:
        W = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TopologyError(f"{name}: a mixing matrix has numbers as entries, but {error}") from error
    if W.ndim != 2 or W.shape[0] != W.shape[1]:
        raise TopologyError(f"{name}: a mixing matrix is square, got shape {W.shape}")
    if not len(W):
        raise TopologyError(f"{name} needs at least 1 learner, got an empty matrix")
    if not np.isfinite(W).all():
        raise TopologyError(f"{name}: a mixing matrix has finite entries only, got NaN or infinity")
    return W


def _check_doubly_stochastic(name: str, W: Array) -> None:
    if W.min() < 0:
        raise TopologyError(f"{name}: a mixing matrix has no negative entries, got {W.min():.6g}")
    row, column = np.unravel_index(np.argmax(abs(W - W.T)), W.shape)
    if abs(W[row, column] - W[column, row]) > TOLERANCE:
        raise TopologyError(
            f"{name}: a mixing matrix is symmetric, because exchanges are mutual, but entry ({row}, {column}) is "
            f"{W[row, column]:.6g} and entry ({column}, {row}) is {W[column, row]:.6g}"
        )
    sums = W.sum(axis=1)
    worst = int(np.argmax(np.abs(sums - 1)))
    if abs(sums[worst] - 1) > TOLERANCE:
        raise TopologyError(
            f"{name}: a mixing matrix is doubly stochastic, but row {worst} sums to {sums[worst]:.6g} instead of 1"
        )
