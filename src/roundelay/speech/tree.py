"""Context-dependent states: a decision tree over the neighbours of a phone. `tree_growing` makes one from data.

A question such as "is the left neighbour one of {M, N, NG}?" leads from a node to one of two others; a leaf is a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roundelay.errors import SpeechError, unknown
from roundelay.speech.hmm import Monophones, Tying, phones_in
from roundelay.speech.segments import Ints

LEFT, RIGHT = 0, 1  # which neighbour a question is about


class DecisionTree(Tying):
    """States tied by left and right neighbours.

    Every triphone, also one that did not occur in training, leads to a leaf of its own phone and position. Several leaves may
    share a state, as variants of a phone do in Kaldi's trees; the phone of that state is then the phone of the first leaf.

    Attributes:
        questions: sets of phones, one boolean row each.
        nodes: one row each. Inner node: side (LEFT or RIGHT), question, node if no, node if yes.
            Leaf: −1, phone, position, state. The first rows are the roots, ordered by phone and position.
    """

    context_width = 3

    def __init__(
        self, phones: Sequence[str], states_per_phone: int, questions: ArrayLike, nodes: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(phones, states_per_phone)
        self.questions = np.asarray(questions, dtype=np.bool_)
        self.nodes = np.asarray(nodes, dtype=np.int32)

    @property
    def _is_leaf(self) -> NDArray[np.bool_]:
        return np.asarray(self.nodes[:, 0] < 0)

    @cached_property
    def _leaf_of_state(self) -> Ints:
        leaves = self.nodes[self._is_leaf][::-1]  # reversed, so that the first leaf of a state is written last
        first_of_state = np.zeros((self.num_states, 4), dtype=np.int32)
        first_of_state[leaves[:, 3]] = leaves
        return first_of_state

    @property
    def num_states(self) -> int:
        """Number of different states of the leaves."""
        return int(self.nodes[self._is_leaf, 3].max()) + 1

    @property
    def phone_of_state(self) -> Ints:
        return np.asarray(self._leaf_of_state[:, 1], dtype=np.int32)

    @property
    def position_of_state(self) -> Ints:
        return np.asarray(self._leaf_of_state[:, 2], dtype=np.int32)

    def chains(self, left: ArrayLike, phone: ArrayLike, right: ArrayLike) -> Ints:
        """States of phones in context, shape (…, n). All triphones walk down the tree at the same time."""
        asked = np.stack(np.broadcast_arrays(left, right))
        n = self.states_per_phone
        roots = np.broadcast_to(np.asarray(phone), asked.shape[1:])[..., None] * n + np.arange(n)
        asked = np.broadcast_to(asked[..., None], (2, *roots.shape)).reshape(2, -1)
        node, moving = roots.ravel().copy(), np.arange(roots.size)
        while True:
            moving = moving[~self._is_leaf[node[moving]]]
            if not len(moving):
                break
            side, question, no, yes = self.nodes[node[moving]].T
            node[moving] = np.where(self.questions[question, asked[side, moving]], yes, no)
        return np.asarray(self.nodes[node, 3].reshape(roots.shape), dtype=np.int32)

    def to_json(self) -> dict[str, Any]:
        """A value for JSON: questions as lists of phones, nodes as rows."""
        return {
            "kind": "tree",
            "phones": list(self.phones),
            "states_per_phone": self.states_per_phone,
            "questions": [[self.phones[i] for i in np.flatnonzero(row)] for row in self.questions],
            "nodes": self.nodes.tolist(),
        }


def tying_from_json(value: dict[str, Any]) -> Tying:
    """The tying that `Tying.to_json` described."""
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


def relabelled(labels_T: ArrayLike, old: Tying, new: Tying) -> Ints:
    """A monophone alignment in the states of another tying."""
    labels = np.asarray(labels_T, dtype=np.int64)
    found = phones_in(labels, old)
    left, right = found.neighbours
    which = np.repeat(np.arange(len(found.phones)), found.durations)
    return np.asarray(new.chains(left, found.phones, right)[which, old.position_of_state[labels]], dtype=np.int32)
