"""Growing a phonetic decision tree from data (Young, Odell and Woodland, 1994).

Every (phone, position) begins as one leaf. Questions about the neighbours split leaves. Each side of a split is modelled by a
single Gaussian, and the split that raises the log likelihood most comes first:

    log L(n frames) = −½ n Σ_d (log 2πσ²_d + 1)          gain = log L(yes) + log L(no) − log L(both) ≥ 0

This needs only the count, sum and sum of squares of the frames of each triphone state, which are gathered once. The questions
come from the data too: phones are merged bottom-up by the same likelihood, and every cluster of phones becomes a question.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roundelay.errors import SpeechError
from roundelay.speech.hmm import Monophones, phones_in
from roundelay.speech.segments import Ints
from roundelay.speech.tree import LEFT, RIGHT, DecisionTree

Doubles = NDArray[np.float64]
_VARIANCE_FLOOR = 1e-3


@dataclass(frozen=True, eq=False)
class ContextStatistics:
    """Statistics of the frames of each triphone state that occurs.

    Attributes:
        contexts_K4: left neighbour, phone, right neighbour and position of each triphone state.
        moments: (n, Σx_1 … Σx_D, Σx²_1 … Σx²_D) of its frames. States are pooled by adding rows.
    """

    contexts_K4: Ints
    moments: Doubles
    tying: Monophones

    @classmethod
    def of(cls, frames: Iterable[NDArray[Any]], labels: Iterable[ArrayLike], tying: Monophones) -> ContextStatistics:
        """Statistics of features with monophone state labels, gathered utterance by utterance."""
        rows: dict[int, int] = {}
        table = np.zeros((1, 1))
        for frames_TD, labels_T in zip(frames, labels, strict=True):
            keys, moments = _runs(np.asarray(frames_TD, dtype=np.float64), np.asarray(labels_T), tying)
            indices = [rows.setdefault(key, len(rows)) for key in keys]
            if table.shape[1] != moments.shape[1] or len(rows) > len(table):
                grown = np.zeros((2 * len(rows), moments.shape[1]))
                if table.shape[1] == moments.shape[1]:
                    grown[: len(table)] = table
                table = grown
            np.add.at(table, indices, moments)
        ordered = sorted(rows)
        shape = (len(tying.phones), len(tying.phones), len(tying.phones), tying.states_per_phone)
        contexts = np.stack(np.unravel_index(ordered, shape), axis=1).astype(np.int32)
        return cls(contexts, table[[rows[key] for key in ordered]], tying)


def _runs(frames_TD: Doubles, labels_T: Ints, tying: Monophones) -> tuple[list[int], Doubles]:
    """Key (of triphone and position) and moments of each run of frames in one state."""
    found = phones_in(labels_T, tying)
    left, right = found.neighbours
    starts = np.unique(np.concatenate([found.starts, np.flatnonzero(np.diff(labels_T)) + 1]))
    which = np.searchsorted(found.starts, starts, side="right") - 1
    position = tying.position_of_state[labels_T[starts]]
    P = len(tying.phones)
    key = (
        (left[which].astype(np.int64) * P + found.phones[which]) * P + right[which]
    ) * tying.states_per_phone + position
    columns = np.concatenate([np.ones((len(frames_TD), 1)), frames_TD, frames_TD**2], axis=1)
    return key.tolist(), np.add.reduceat(columns, starts, axis=0)


def log_likelihood(moments: Doubles) -> Doubles:
    """−½ n Σ_d (log 2πσ²_d + 1): log likelihood of frames under the Gaussian fitted to them. The last axis holds moments."""
    n = moments[..., 0]
    dimensions = (moments.shape[-1] - 1) // 2
    safe = np.maximum(n, 1e-10)[..., None]
    mean = moments[..., 1 : 1 + dimensions] / safe
    variance = np.maximum(moments[..., 1 + dimensions :] / safe - mean**2, _VARIANCE_FLOOR)
    return np.asarray(-0.5 * n * (np.log(2 * np.pi * variance) + 1).sum(axis=-1), dtype=np.float64)


def questions_from(seen: ContextStatistics) -> NDArray[np.bool_]:
    """Sets of phones, one boolean row each: every single phone, and every cluster of a bottom-up clustering.

    The two clusters whose merging costs the least likelihood, summed over the positions of a phone, are merged first.
    """
    P, n = len(seen.tying.phones), seen.tying.states_per_phone
    pooled = np.zeros((P, n, seen.moments.shape[1]))
    np.add.at(pooled, (seen.contexts_K4[:, 1], seen.contexts_K4[:, 3]), seen.moments)
    member = np.eye(P, dtype=np.bool_)
    found = list(member.copy())
    alone = log_likelihood(pooled).sum(axis=1)
    cost = np.full((P, P), np.inf)
    for i in range(P):
        cost[i, i + 1 :] = alone[i] + alone[i + 1 :] - log_likelihood(pooled[i] + pooled[i + 1 :]).sum(axis=1)
    for _ in range(P - 2):  # the cluster of all phones would be a useless question
        i, j = (int(index) for index in np.unravel_index(np.argmin(cost), cost.shape))
        pooled[i] += pooled[j]
        member[i] |= member[j]
        found.append(member[i].copy())
        cost[j, :] = cost[:, j] = np.inf
        alone[i] = log_likelihood(pooled[i]).sum()
        alive = np.isfinite(cost[i, :]) | np.isfinite(cost[:, i])
        for others, view in ((np.flatnonzero(alive[:i]), cost[:, i]), (i + np.flatnonzero(alive[i:]), cost[i, :])):
            view[others] = alone[i] + alone[others] - log_likelihood(pooled[i] + pooled[others]).sum(axis=1)
    return np.stack(found)


class _Split(NamedTuple):
    gain: float
    side: int
    question: int


class _Grower:
    """A tree under construction. The heap holds the leaves that can be split, the one with the largest gain first."""

    def __init__(self, seen: ContextStatistics, min_count: float) -> None:
        self.seen, self.min_count = seen, min_count
        self.questions = questions_from(seen)
        P, n = len(seen.tying.phones), seen.tying.states_per_phone
        self.nodes: list[list[int]] = []
        self.rows: list[NDArray[np.intp]] = []
        self.heap: list[tuple[float, int, _Split]] = []
        root_of_row = seen.contexts_K4[:, 1] * n + seen.contexts_K4[:, 3]
        for root in range(P * n):
            self.add_leaf(root // n, root % n, np.flatnonzero(root_of_row == root))

    def add_leaf(self, phone: int, position: int, rows: NDArray[np.intp]) -> int:
        """Add a leaf for the triphone states `rows`, and return its node."""
        node = len(self.nodes)
        self.nodes.append([-1, phone, position, -1])
        self.rows.append(rows)
        split = self.best_split(rows) if phone != 0 else None  # silence does not depend on its neighbours
        if split is not None:
            heapq.heappush(self.heap, (-split.gain, node, split))
        return node

    def best_split(self, rows: NDArray[np.intp]) -> _Split | None:
        """The split with the largest gain over all questions and both sides; None if no split has enough frames and a gain."""
        moments = self.seen.moments[rows]
        if not len(rows) or moments[:, 0].sum() < 2 * self.min_count:
            return None
        both = moments.sum(axis=0)
        by_neighbour = np.zeros((2, self.questions.shape[1], moments.shape[1]))
        for side, column in ((LEFT, 0), (RIGHT, 2)):
            np.add.at(by_neighbour[side], self.seen.contexts_K4[rows, column], moments)
        yes = self.questions.astype(np.float64) @ by_neighbour  # moments of all answers at once
        no = both - yes
        gain = log_likelihood(yes) + log_likelihood(no) - log_likelihood(both)
        gain[(yes[..., 0] < self.min_count) | (no[..., 0] < self.min_count)] = -np.inf
        side, question = (int(index) for index in np.unravel_index(np.argmax(gain), gain.shape))
        return _Split(float(gain[side, question]), side, question) if gain[side, question] > 0 else None

    def split_best(self) -> float:
        """Split the leaf with the largest gain, and return that gain."""
        _, node, (gain, side, question) = heapq.heappop(self.heap)
        _, phone, position, _ = self.nodes[node]
        rows = self.rows[node]
        neighbour = self.seen.contexts_K4[rows, 0 if side == LEFT else 2]
        answer = self.questions[question, neighbour]
        no, yes = (self.add_leaf(phone, position, rows[answer == wanted]) for wanted in (False, True))
        self.nodes[node] = [side, question, no, yes]
        return gain


def decision_tree(seen: ContextStatistics, num_states: int, min_count: float = 100.0) -> DecisionTree:
    """A tree with at most `num_states` leaves, each with at least `min_count` frames.

    Raises SpeechError if `num_states` is less than phones × positions.
    """
    tying = seen.tying
    if num_states < tying.num_states:
        raise SpeechError(
            f"a tree needs at least one state per phone and position, {tying.num_states}, got {num_states}"
        )
    grower = _Grower(seen, min_count)
    leaves = tying.num_states
    while grower.heap and leaves < num_states:
        grower.split_best()
        leaves += 1
    return DecisionTree(tying.phones, tying.states_per_phone, grower.questions, _numbered(grower.nodes))


def _numbered(nodes: list[list[int]]) -> list[list[int]]:
    """The nodes, with states numbered by phone, position, and then node."""
    leaves = sorted((phone, position, node) for node, (side, phone, position, _) in enumerate(nodes) if side < 0)
    for state, (_, _, node) in enumerate(leaves):
        nodes[node][3] = state
    return nodes
