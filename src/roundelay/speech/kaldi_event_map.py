"""The event map in Kaldi's file `tree`, binary or text (`copy-tree --binary=false`).

An event map leads from a phone in context to a pdf. Its keys are positions in the context window, and −1 for the position of
a state in its phone (Kaldi's pdf-class). Its values are phones, or positions. It is written as

    CE pdf                          an answer
    SE key [ values ] { yes no }    a question: is the value of the key one of these?
    TE key size ( map map … )       one map for each value of the key, NULL for none
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from roundelay.errors import DataError

POSITION_KEY = -1


class Answer(NamedTuple):
    """The pdf for a phone in context."""

    pdf: int


class Question(NamedTuple):
    """Leads to `yes` if the value of the key is one of `values`, else to `no`."""

    key: int
    values: frozenset[int]
    yes: EventMap
    no: EventMap


class Table(NamedTuple):
    """One map for each value of the key, None for a value that cannot occur."""

    key: int
    maps: tuple[EventMap | None, ...]


EventMap: TypeAlias = "Answer | Question | Table"


def restricted(found: EventMap | None, known: Mapping[int, int]) -> EventMap | None:
    """The map for given values of some keys. None if the map has no answer for them."""
    if found is None or isinstance(found, Answer):
        return found
    if found.key in known:
        value = known[found.key]
        if isinstance(found, Question):
            return restricted(found.yes if value in found.values else found.no, known)
        return restricted(found.maps[value] if 0 <= value < len(found.maps) else None, known)
    if isinstance(found, Question):
        yes, no = restricted(found.yes, known), restricted(found.no, known)
        return found._replace(yes=yes, no=no) if yes and no else yes or no
    maps = tuple(restricted(each, known) for each in found.maps)
    return Table(found.key, maps) if any(maps) else None


def read_event_map(path: Path) -> tuple[int, int, EventMap]:
    """Width of the context window, position of the centre phone, and the event map. Raises DataError for another format."""
    try:
        content = path.read_bytes()
        reader = _Binary(content) if content[:2] == b"\0B" else _Text(content)
        reader.expect("ContextDependency")
        width, centre = reader.integer(), reader.integer()
        reader.expect("ToPdf")
        root = _event_map(reader)
        reader.expect("EndContextDependency")
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise DataError(f"'{path}' is not a decision tree of Kaldi: {error}") from error
    if root is None:
        raise DataError(f"'{path}' is an empty tree")
    return width, centre, root


class _Text:
    """Reads Kaldi's text format: words with white space between them."""

    def __init__(self, content: bytes) -> None:
        self._words = content.decode().split()[::-1]

    def token(self) -> str:
        return self._words.pop()

    def expect(self, token: str) -> None:
        """Read one word. Raises ValueError if the word is not `token`."""
        if (found := self.token()) != token:
            raise ValueError(f"expected '{token}', found '{found}'")

    def integer(self) -> int:
        return int(self.token())

    def integers(self) -> list[int]:
        """A list of numbers, such as `[ 1 2 3 ]`."""
        self.expect("[")
        found = []
        while (token := self.token()) != "]":
            found.append(int(token))
        return found


class _Binary(_Text):
    """Reads Kaldi's binary format: words end with a space; a byte with its size precedes each number."""

    def __init__(self, content: bytes) -> None:
        self._content, self._offset = content, 2

    def token(self) -> str:
        end = self._content.index(b" ", self._offset)
        word, self._offset = self._content[self._offset : end].decode(), end + 1
        return word

    def integer(self) -> int:
        """The next number: a byte with its size (negative if it is unsigned), then four bytes."""
        return self._unpacked("<bi")[1]

    def integers(self) -> list[int]:
        """A list of numbers: a byte with their size, their count, and the numbers."""
        _, count = self._unpacked("<bi")
        return self._unpacked(f"<{count}i")

    def _unpacked(self, form: str) -> list[int]:
        values = struct.unpack_from(form, self._content, self._offset)
        self._offset += struct.calcsize(form)
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
        raise ValueError(f"expected CE, SE, TE or NULL, found '{kind}'")
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
