"""Kaldi's decision trees, as our own: which pdf serves position k of a phone between its neighbours.

The file `tree` (binary, or text by `copy-tree --binary=false`) is an event map. Its keys are places of a context window, and −1
for the position in the phone, which Kaldi calls a pdf-class; its answers are pdfs:

    CE answer                       an answer
    SE key [ values ] { yes no }    is the key's value one of these?
    TE key size ( map map … )       a map for each value, NULL for none
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import DataError, SpeechError
from roundelay.speech.tree import LEFT, RIGHT, DecisionTree

STATES_PER_PHONE = 3
_POSITION = -1  # the key of the position


class Answer(NamedTuple):
    """A pdf."""

    pdf: int


class Question(NamedTuple):
    """Whether the value of the key is one of these."""

    key: int
    values: frozenset[int]
    yes: EventMap
    no: EventMap


class Table(NamedTuple):
    """A map for each value of the key."""

    key: int
    maps: tuple[EventMap | None, ...]


EventMap: TypeAlias = "Answer | Question | Table"


class KaldiTree(NamedTuple):
    """A tree in our terms.

    Kaldi's silence usually has five states, ours has three: `merged` says which pdf stands for the others.
    """

    tying: DecisionTree
    merged: dict[int, int]


def read_tree(tree: Path, phones: Path, silence: str) -> KaldiTree:
    """The tree in a file, with the names of phones.txt; phones that the tree does not know (marks of the lexicon) are left out.

    Raises DataError for files that are none, SpeechError for a tree that is not one of (tri)phones with three states.
    """
    width, centre, root = _parsed(tree)
    if (width, centre) not in ((3, 1), (1, 0)):
        raise SpeechError(f"'{tree}' has windows of {width} phones around the one at {centre}; 3 around 1 can be used")
    maps = {name: (number, _restricted(root, {centre: number})) for name, number in _numbers(phones).items()}
    known = {name: (number, found) for name, (number, found) in maps.items() if found}
    if silence not in known:
        raise SpeechError(f"'{tree}' and '{phones}' have no silence phone '{silence}'")
    ordered = (silence, *(name for name in known if name != silence))
    grower = _Grower([known[name][0] for name in ordered], centre)
    merged: dict[int, int] = {}
    for place, name in enumerate(ordered):
        first, *middle, last = _by_position(known[name][1], name)
        chosen = middle[len(middle) // 2]
        for position, found in enumerate((first, chosen, last)):
            grower.fill(place * STATES_PER_PHONE + position, found)
        if isinstance(chosen, Answer):
            merged |= {other.pdf: chosen.pdf for other in middle if isinstance(other, Answer) and other != chosen}
    return KaldiTree(DecisionTree(ordered, STATES_PER_PHONE, grower.questions, grower.nodes), merged)


def _numbers(path: Path) -> dict[str, int]:
    """phones.txt: a name and its number on each line; 0 is nothing."""
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {name: int(number) for name, number in rows if int(number) > 0}
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' is no table of phones: {error}") from error


def _restricted(found: EventMap | None, known: Mapping[int, int]) -> EventMap | None:
    """The map where some keys have known values; None if it has no answer there."""
    if found is None or isinstance(found, Answer):
        return found
    if found.key in known:
        value = known[found.key]
        if isinstance(found, Question):
            return _restricted(found.yes if value in found.values else found.no, known)
        return _restricted(found.maps[value] if 0 <= value < len(found.maps) else None, known)
    if isinstance(found, Question):
        yes, no = _restricted(found.yes, known), _restricted(found.no, known)
        return found._replace(yes=yes, no=no) if yes and no else yes or no
    maps = tuple(_restricted(each, known) for each in found.maps)
    return Table(found.key, maps) if any(maps) else None


def _by_position(found: EventMap | None, name: str) -> list[EventMap]:
    """The maps of a phone's positions, which are as many as its table has, or three."""
    table = isinstance(found, Table) and found.key == _POSITION
    count = len(found.maps) if table and isinstance(found, Table) else STATES_PER_PHONE
    maps = [each for k in range(count) if (each := _restricted(found, {_POSITION: k}))]
    if len(maps) < STATES_PER_PHONE:
        raise SpeechError(f"phone '{name}' of the tree has {len(maps)} states, {STATES_PER_PHONE} or more can be used")
    return maps


class _Grower:
    """Rows of a `DecisionTree` from event maps that ask for neighbours only."""

    def __init__(self, numbers: Sequence[int], centre: int) -> None:
        self._numbers, self._side = np.array(numbers), {centre - 1: LEFT, centre + 1: RIGHT}
        self._question: dict[frozenset[int], int] = {frozenset(): 0}  # one at least, so that there is a table
        n = STATES_PER_PHONE
        self.nodes = [[-1, root // n, root % n, -1] for root in range(n * len(numbers))]

    @property
    def questions(self) -> NDArray[np.bool_]:
        """Sets of phones in our numbering, one per row."""
        return np.stack([np.isin(self._numbers, list(values)) for values in self._question])

    def fill(self, node: int, found: EventMap) -> None:
        """Put a map where a leaf stands."""
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
    """A table of neighbours as questions for one after the other; the last answer serves those that are not in it."""
    (_, found), *others = [(value, each) for value, each in reversed(list(enumerate(table.maps))) if each]
    for value, each in others:
        found = Question(table.key, frozenset([value]), each, found)
    return found


def _parsed(path: Path) -> tuple[int, int, EventMap]:
    """Width of the window, place of its centre, and the event map."""
    try:
        content = path.read_bytes()
        reader = _Binary(content) if content[:2] == b"\0B" else _Text(content)
        reader.expect("ContextDependency")
        width, centre = reader.integer(), reader.integer()
        reader.expect("ToPdf")
        root = _event_map(reader)
        reader.expect("EndContextDependency")
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise DataError(f"'{path}' is no decision tree of Kaldi: {error}") from error
    if root is None:
        raise DataError(f"'{path}' is an empty tree")
    return width, centre, root


class _Text:
    """Words with white space between them."""

    def __init__(self, content: bytes) -> None:
        self._words = content.decode().split()[::-1]

    def token(self) -> str:
        """The next word."""
        return self._words.pop()

    def expect(self, token: str) -> None:
        """The next word must be this one."""
        if (found := self.token()) != token:
            raise ValueError(f"'{found}' stands where '{token}' should")

    def integer(self) -> int:
        """The next number."""
        return int(self.token())

    def integers(self) -> list[int]:
        """`[ 1 2 3 ]`."""
        self.expect("[")
        found = []
        while (token := self.token()) != "]":
            found.append(int(token))
        return found


class _Binary(_Text):
    """Kaldi's binary form: words end with a space; a number has its size before it."""

    def __init__(self, content: bytes) -> None:
        self._content, self._place = content, 2

    def token(self) -> str:
        """Up to the next space."""
        end = self._content.index(b" ", self._place)
        word, self._place = self._content[self._place : end].decode(), end + 1
        return word

    def integer(self) -> int:
        """A byte with its size, negative if it has no sign, then four bytes."""
        return self._unpacked("<bi")[1]

    def integers(self) -> list[int]:
        """A byte with the size of each, their number, and they themselves."""
        _, count = self._unpacked("<bi")
        return self._unpacked(f"<{count}i")

    def _unpacked(self, form: str) -> list[int]:
        values = struct.unpack_from(form, self._content, self._place)
        self._place += struct.calcsize(form)
        return list(values)


def _event_map(reader: _Text) -> EventMap | None:
    kind = reader.token()
    if kind == "NULL":
        return None
    if kind == "CE":
        return Answer(reader.integer())
    if kind == "SE":
        return _question(reader)
    if kind != "TE":
        raise ValueError(f"'{kind}' stands where CE, SE, TE or NULL should")
    key, size = reader.integer(), reader.integer()
    reader.expect("(")
    maps = tuple(_event_map(reader) for _ in range(size))
    reader.expect(")")
    return Table(key, maps)


def _question(reader: _Text) -> Question:
    key, values = reader.integer(), frozenset(reader.integers())
    reader.expect("{")
    yes, no = _event_map(reader), _event_map(reader)
    reader.expect("}")
    if yes is None or no is None:
        raise ValueError("a question has no answer")
    return Question(key, values, yes, no)
