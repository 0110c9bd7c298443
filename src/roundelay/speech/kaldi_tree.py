"""Kaldi's decision trees as ours: which state (Kaldi's pdf) position k of a phone has between its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import DataError, SpeechError
from roundelay.speech.kaldi_event_map import POSITION_KEY, Answer, EventMap, Question, Table, read_event_map, restricted
from roundelay.speech.tree import LEFT, RIGHT, DecisionTree

STATES_PER_PHONE = 3


class KaldiTree(NamedTuple):
    """A decision tree of Kaldi.

    Kaldi's silence usually has five states and ours has three. `merged` maps each pdf that is left out to its replacement.
    """

    tying: DecisionTree
    merged: dict[int, int]


def read_tree(tree: Path, phones: Path, silence: str) -> KaldiTree:
    """The tree in a file, with the phone names of phones.txt.

    Entries of phones.txt that the tree does not know, such as disambiguation symbols, are left out. Raises DataError for files
    in another format, and SpeechError for a tree with another context than one phone to each side or none.
    """
    width, centre, root = read_event_map(tree)
    if (width, centre) not in ((3, 1), (1, 0)):
        raise SpeechError(
            f"'{tree}' has context windows of {width} phones with the centre at {centre}; "
            "allowed are 3 phones with the centre at 1 (triphones) and 1 phone with the centre at 0 (monophones)"
        )
    maps = {name: (number, restricted(root, {centre: number})) for name, number in _numbers(phones).items()}
    known = {name: (number, found) for name, (number, found) in maps.items() if found}
    if silence not in known:
        raise SpeechError(f"'{tree}' and '{phones}' have no silence phone '{silence}'")
    ordered = (silence, *(name for name in known if name != silence))
    grower = _Grower([known[name][0] for name in ordered], centre)
    merged: dict[int, int] = {}
    for index, name in enumerate(ordered):
        first, *middle, last = _by_position(known[name][1], name)
        chosen = middle[len(middle) // 2]
        for position, found in enumerate((first, chosen, last)):
            grower.fill(index * STATES_PER_PHONE + position, found)
        if isinstance(chosen, Answer):
            merged |= {other.pdf: chosen.pdf for other in middle if isinstance(other, Answer) and other != chosen}
    return KaldiTree(DecisionTree(ordered, STATES_PER_PHONE, grower.questions, grower.nodes), merged)


def _numbers(path: Path) -> dict[str, int]:
    """Phones and their numbers in phones.txt, without number 0, which is the empty symbol."""
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {name: int(number) for name, number in rows if int(number) > 0}
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' is not a table of phones and numbers: {error}") from error


def _by_position(found: EventMap | None, name: str) -> list[EventMap]:
    """One map per position of a phone: as many as its table has, otherwise three."""
    count = len(found.maps) if isinstance(found, Table) and found.key == POSITION_KEY else STATES_PER_PHONE
    maps = [each for k in range(count) if (each := restricted(found, {POSITION_KEY: k}))]
    if len(maps) < STATES_PER_PHONE:
        raise SpeechError(f"phone '{name}' of the tree has {len(maps)} states; at least {STATES_PER_PHONE} are needed")
    return maps


class _Grower:
    """Makes rows of `DecisionTree.nodes` from event maps whose keys are neighbours only."""

    def __init__(self, numbers: Sequence[int], centre: int) -> None:
        self._numbers, self._side = np.array(numbers), {centre - 1: LEFT, centre + 1: RIGHT}
        self._question: dict[frozenset[int], int] = {frozenset(): 0}  # at least one, so that `questions` has a row
        n = STATES_PER_PHONE
        self.nodes = [[-1, root // n, root % n, -1] for root in range(n * len(numbers))]

    @property
    def questions(self) -> NDArray[np.bool_]:
        """Sets of phones, one boolean row each; columns are our phone numbers."""
        return np.stack([np.isin(self._numbers, list(values)) for values in self._question])

    def fill(self, node: int, found: EventMap) -> None:
        """Replace the leaf at `node` by a map."""
        while isinstance(found, Table):
            found = _as_questions(found)
        if isinstance(found, Answer):
            self.nodes[node][3] = found.pdf
            return
        _, phone, position, _ = self.nodes[node]
        no, yes = len(self.nodes), len(self.nodes) + 1
        self.nodes += [[-1, phone, position, -1], [-1, phone, position, -1]]
        question = self._question.setdefault(found.values, len(self._question))
        self.nodes[node] = [self._side[found.key], question, no, yes]
        self.fill(no, found.no)
        self.fill(yes, found.yes)


def _as_questions(table: Table) -> EventMap:
    """A table as a chain of questions, one per value. A value that the table lacks gets the answer of the last one."""
    (_, found), *others = [(value, each) for value, each in reversed(list(enumerate(table.maps))) if each]
    for value, each in others:
        found = Question(table.key, frozenset([value]), each, found)
    return found
