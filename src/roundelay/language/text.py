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
    def read(cls, path: str) -> Text:
        """Read a UTF-8 file; see `find_text`. Raises DataError if it cannot be read."""
        file = find_text(path)
        try:
            return cls.of(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read '{file}' as UTF-8 text: {error}") from None

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
        train = round(SHARES["train"] * len(text))
        valid = train + round(SHARES["valid"] * len(text))
        return cls(characters, {"train": numbers[:train], "valid": numbers[train:valid], "test": numbers[valid:]})

    def encode(self, text: str) -> Tensor:
        """The numbers of characters that all occur in the text."""
        return torch.tensor([self.characters.index(character) for character in text], dtype=torch.int64)

    def decode(self, numbers: Tensor) -> str:
        """The characters."""
        return "".join(self.characters[number] for number in numbers.tolist())


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
