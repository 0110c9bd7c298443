"""Context-dependent states: a phonetic decision tree, grown from data alone.

Every (phone, position) begins as one leaf. Questions such as "is the left neighbour one of {M, N, NG}?" split leaves, best first,
where a single Gaussian on either side explains the frames most better than one for both:

    log L(n frames) = −½ n Σ_d (log 2πσ²_d + 1)          gain = log L(yes) + log L(no) − log L(both) ≥ 0

Only counts, sums and sums of squares of each triphone state are needed, gathered once (Young, Odell and Woodland, 1994). The
questions come from data too: phones are merged bottom-up by the same likelihood, and every cluster on the way is a question.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roundelay.errors import SpeechError, unknown
from roundelay.speech.hmm import Monophones, Tying, phones_in
from roundelay.speech.segments import Ints

Doubles = NDArray[np.float64]
_VARIANCE_FLOOR = 1e-3
LEFT, RIGHT = 0, 1  # which neighbour a question is about


@dataclass(frozen=True, eq=False)
class ContextStatistics:
    """Per triphone state seen: left neighbour, phone, right neighbour, position; and its frames' count, sum and squares.

    A row of `moments` is (n, Σx_1 … Σx_D, Σx²_1 … Σx²_D), so that pooling states is adding rows.
    """

    contexts_K4: Ints
    moments: Doubles
    tying: Monophones

    @classmethod
    def of(cls, frames: Iterable[NDArray[Any]], labels: Iterable[ArrayLike], tying: Monophones) -> ContextStatistics:
        """Gathered utterance by utterance from features and monophone state labels."""
        rows: dict[int, int] = {}
        table = np.zeros((1, 1))
        for frames_TD, labels_T in zip(frames, labels, strict=True):
            keys, moments = _runs(np.asarray(frames_TD, dtype=np.float64), np.asarray(labels_T), tying)
            places = [rows.setdefault(key, len(rows)) for key in keys]
            if table.shape[1] != moments.shape[1] or len(rows) > len(table):
                grown = np.zeros((2 * len(rows), moments.shape[1]))
                if table.shape[1] == moments.shape[1]:
                    grown[: len(table)] = table
                table = grown
            np.add.at(table, places, moments)
        ordered = sorted(rows)
        shape = (len(tying.phones), len(tying.phones), len(tying.phones), tying.states_per_phone)
        contexts = np.stack(np.unravel_index(ordered, shape), axis=1).astype(np.int32)
        return cls(contexts, table[[rows[key] for key in ordered]], tying)


def _runs(frames_TD: Doubles, labels_T: Ints, tying: Monophones) -> tuple[list[int], Doubles]:
    """Key and moments of each stretch of frames in one state."""
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
    """−½ n Σ_d (log 2πσ²_d + 1) of Gaussians fitted to their own frames; any number of them, in the last axis their moments."""
    n = moments[..., 0]
    dimensions = (moments.shape[-1] - 1) // 2
    safe = np.maximum(n, 1e-10)[..., None]
    mean = moments[..., 1 : 1 + dimensions] / safe
    variance = np.maximum(moments[..., 1 + dimensions :] / safe - mean**2, _VARIANCE_FLOOR)
    return np.asarray(-0.5 * n * (np.log(2 * np.pi * variance) + 1).sum(axis=-1), dtype=np.float64)


def questions_from(seen: ContextStatistics) -> NDArray[np.bool_]:
    """Sets of phones, one per row: each phone alone, and each cluster met when the two most alike are merged again and again.

    Alike are clusters whose merging costs least likelihood, summed over the positions of a phone.
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
    for _ in range(P - 2):  # merging the last two would ask nothing
        i, j = (int(place) for place in np.unravel_index(np.argmin(cost), cost.shape))
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


class DecisionTree(Tying):
    """States tied by left and right neighbours; a value that JSON can hold.

    Nodes are rows of a table: a node asks whether the left or the right neighbour is in a set of phones; a leaf is a state. Every
    triphone, seen or not, ends in some leaf of its own phone and position. Several leaves may share a state, as in Kaldi's trees,
    where variants of a phone do; the state's phone is then that of the first.
    """

    context_width = 3

    def __init__(
        self, phones: Sequence[str], states_per_phone: int, questions: ArrayLike, nodes: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(phones, states_per_phone)
        self.questions = np.asarray(questions, dtype=np.bool_)
        self.nodes = np.asarray(nodes, dtype=np.int32)  # side, question, no, yes; a leaf: −1, phone, position, state

    @property
    def _is_leaf(self) -> NDArray[np.bool_]:
        return np.asarray(self.nodes[:, 0] < 0)

    @cached_property
    def _leaves(self) -> Ints:
        leaves = self.nodes[self._is_leaf][::-1]
        first_of_state = np.zeros((self.num_states, 4), dtype=np.int32)
        first_of_state[leaves[:, 3]] = leaves
        return first_of_state

    @property
    def num_states(self) -> int:
        """One more than the largest number of a leaf."""
        return int(self.nodes[self._is_leaf, 3].max()) + 1

    @property
    def phone_of_state(self) -> Ints:
        """The phone at whose root the leaf's tree stands."""
        return np.asarray(self._leaves[:, 1], dtype=np.int32)

    @property
    def position_of_state(self) -> Ints:
        """The position at whose root the leaf's tree stands."""
        return np.asarray(self._leaves[:, 2], dtype=np.int32)

    def chains(self, left: ArrayLike, phone: ArrayLike, right: ArrayLike) -> Ints:
        """Down the tree, all triphones at once."""
        asked = np.stack(np.broadcast_arrays(left, right))
        n = self.states_per_phone
        roots = np.broadcast_to(np.asarray(phone), asked.shape[1:])[..., None] * n + np.arange(n)
        asked = np.broadcast_to(asked[..., None], (2, *roots.shape)).reshape(2, -1)
        place, walker = roots.ravel().copy(), np.arange(roots.size)
        while True:
            walker = walker[~self._is_leaf[place[walker]]]
            if not len(walker):
                break
            side, question, no, yes = self.nodes[place[walker]].T
            place[walker] = np.where(self.questions[question, asked[side, walker]], yes, no)
        return np.asarray(self.nodes[place, 3].reshape(roots.shape), dtype=np.int32)

    def to_json(self) -> dict[str, Any]:
        """Questions as lists of phones, nodes as rows."""
        return {
            "kind": "tree",
            "phones": list(self.phones),
            "states_per_phone": self.states_per_phone,
            "questions": [[self.phones[i] for i in np.flatnonzero(row)] for row in self.questions],
            "nodes": self.nodes.tolist(),
        }


def tying_from_json(value: dict[str, Any]) -> Tying:
    """The inverse of any tying's `to_json`."""
    phones, n = value["phones"], value["states_per_phone"]
    if value["kind"] == "monophones":
        return Monophones(phones, n)
    if value["kind"] != "tree":
        raise SpeechError(unknown("kind of tying", value["kind"], ("monophones", "tree")))
    number = {phone: i for i, phone in enumerate(phones)}
    questions = np.zeros((len(value["questions"]), len(phones)), dtype=np.bool_)
    for row, members in zip(questions, value["questions"], strict=True):
        row[[number[phone] for phone in members]] = True
    return DecisionTree(phones, n, questions, value["nodes"])


class _Grower:
    """A tree under construction: leaves wait in a heap, the one with the largest gain first."""

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
        node = len(self.nodes)
        self.nodes.append([-1, phone, position, -1])
        self.rows.append(rows)
        split = self.best_split(rows) if phone != 0 else None  # silence sounds the same beside anything
        if split is not None:
            heapq.heappush(self.heap, (-split.gain, node, split))
        return node

    def best_split(self, rows: NDArray[np.intp]) -> _Split | None:
        """Over all questions and both sides; moments of all answers at once are a matrix product with the questions."""
        moments = self.seen.moments[rows]
        if not len(rows) or moments[:, 0].sum() < 2 * self.min_count:
            return None
        both = moments.sum(axis=0)
        by_neighbour = np.zeros((2, self.questions.shape[1], moments.shape[1]))
        for side, column in ((LEFT, 0), (RIGHT, 2)):
            np.add.at(by_neighbour[side], self.seen.contexts_K4[rows, column], moments)
        yes = self.questions.astype(np.float64) @ by_neighbour
        no = both - yes
        gain = log_likelihood(yes) + log_likelihood(no) - log_likelihood(both)
        gain[(yes[..., 0] < self.min_count) | (no[..., 0] < self.min_count)] = -np.inf
        side, question = (int(place) for place in np.unravel_index(np.argmax(gain), gain.shape))
        return _Split(float(gain[side, question]), side, question) if gain[side, question] > 0 else None

    def split_best(self) -> float:
        """Split the leaf with the largest gain, which is returned."""
        negative_gain, node, (_, side, question) = heapq.heappop(self.heap)
        _, phone, position, _ = self.nodes[node]
        rows = self.rows[node]
        neighbour = self.seen.contexts_K4[rows, 0 if side == LEFT else 2]
        answer = self.questions[question, neighbour]
        no, yes = (self.add_leaf(phone, position, rows[answer == wanted]) for wanted in (False, True))
        self.nodes[node] = [side, question, no, yes]
        return -negative_gain


def decision_tree(seen: ContextStatistics, num_states: int, min_count: float = 100.0) -> DecisionTree:
    """A tree with up to `num_states` leaves of at least `min_count` frames each, fewer where data do not support more.

    Raises SpeechError when there are fewer states than phones × positions.
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
    """Leaves numbered by phone and position, then in the order in which they were made."""
    leaves = sorted((phone, position, node) for node, (side, phone, position, _) in enumerate(nodes) if side < 0)
    for state, (_, _, node) in enumerate(leaves):
        nodes[node][3] = state
    return nodes


def relabelled(labels_T: ArrayLike, old: Tying, new: Tying) -> Ints:
    """The same alignment in another tying's states."""
    labels = np.asarray(labels_T, dtype=np.int64)
    found = phones_in(labels, old)
    left, right = found.neighbours
    which = np.repeat(np.arange(len(found.phones)), found.durations)
    return np.asarray(new.chains(left, found.phones, right)[which, old.position_of_state[labels]], dtype=np.int32)
