"""A text as numbers: one per character, split into training, validation and test parts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from roundelay.errors import DataError

DATA_VARIABLE = "ROUNDELAY_DATA"
FILE = "shakespeare.txt"
SHARES = {"train": 0.9, "valid": 0.05, "test": 0.05}


@dataclass(frozen=True)
class Text:
    """The characters of a text.

    Attributes:
        characters: every character that occurs, sorted; its position is its number.
        splits: numbers of the characters of each part of the text, in order; see `SHARES`.
    """

    characters: str
    splits: dict[str, Tensor]

    @classmethod
    def of(cls, text: str) -> Text:
        """Number the characters and split the text.

        >>> found = Text.of("abcab" * 20)
        >>> found.characters, found.splits["valid"].tolist()
        ('abc', [0, 1, 2, 0, 1])
        """
        characters = "".join(sorted(set(text)))
        number = {character: index for index, character in enumerate(characters)}
        numbers = torch.tensor([number[character] for character in text], dtype=torch.int64)
        sizes = _sizes(len(text))
        return cls(characters, dict(zip(sizes, numbers.split(list(sizes.values())), strict=True)))

    def encode(self, text: str) -> Tensor:
        """The numbers of characters that all occur in the text."""
        return torch.tensor([self.characters.index(character) for character in text], dtype=torch.int64)

    def decode(self, numbers: Tensor) -> str:
        """The characters."""
        return "".join(self.characters[number] for number in numbers.tolist())


def read_text(path: str, context: int = 1) -> str:
    """The characters of a UTF-8 file; see `find_text`.

    Raises DataError if it cannot be read, or if its validation part has no piece of `context` characters and the next one.
    """
    file = find_text(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read '{file}' as UTF-8 text: {error}") from None
    if min(_sizes(len(text)).values()) <= context:
        raise DataError(
            f"'{file}' has {len(text):,} characters; a context of {context} needs about {context / SHARES['valid'] + 20:,.0f} or "
            f"more, because {SHARES['valid']:.0%} of them are for validation; name a longer text, or set settings.context"
        )
    return text


def _sizes(characters: int) -> dict[str, int]:
    """Characters of each part."""
    train, valid = round(SHARES["train"] * characters), round(SHARES["valid"] * characters)
    return {"train": train, "valid": valid, "test": characters - train - valid}


def find_text(path: str) -> Path:
    """The text file: `path`, or shakespeare.txt in the folder `path`, which is $ROUNDELAY_DATA by default.

    Raises DataError if there is none.
    """
    given = path or os.environ.get(DATA_VARIABLE, "")
    if not given:
        raise DataError(f"name a text file by --data, or a folder with {FILE} by --data or ${DATA_VARIABLE}")
    file = Path(given) / FILE if Path(given).is_dir() else Path(given)
    if not file.is_file():
        raise DataError(f"there is no text file '{file}'; name one by --data, any UTF-8 text will do")
    return file
