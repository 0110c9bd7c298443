"""Matrices and vectors in Kaldi's archives, read one at a time with kaldiio."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import DataError
from roundelay.speech.cache import fingerprint, state_of
from roundelay.speech.corpus import Utterance
from roundelay.speech.libraries import library
from roundelay.speech.text_files import lines_of


def table_of(path: Path) -> dict[str, str]:
    """The first word of each line of a Kaldi file, and the rest of the line. The file is read again only if it has changed."""
    return _table_of(path, state_of(path))


@functools.cache
def _table_of(path: Path, state: tuple[int, int]) -> dict[str, str]:
    lines = (line.split(maxsplit=1) for line in lines_of(path) if line.strip())
    return {words[0]: words[1].strip() if len(words) > 1 else "" for words in lines}


def located(path: Path, name: str) -> Path:
    """The file `name` that the Kaldi file `path` mentions: relative to the current folder, else to a folder above `path`.

    Kaldi writes paths relative to the folder in which its recipe ran, which is usually some levels above the data directory.
    """
    target = Path(name)
    if target.is_absolute() or target.exists():
        return target
    return next((folder / target for folder in path.absolute().parents if (folder / target).exists()), target)


def load(scp: Path, name: str) -> NDArray[Any]:
    """The matrix or vector of a name. Raises DataError if it is unreadable, or if it is a command, which is never run."""
    where = table_of(scp).get(name)
    if where is None:
        raise DataError(f"'{name}' is not in {scp.name}")
    if where.endswith("|") or where.startswith("|"):
        raise DataError(f"{scp.name} has a command for '{name}'; write its output to an archive instead")
    file, colon, rest = where.partition(":")
    try:
        found = np.asarray(library("kaldiio", "reading Kaldi archives").load_mat(f"{located(scp, file)}{colon}{rest}"))
    except (OSError, ValueError, AssertionError, RuntimeError, struct.error) as error:
        raise DataError(f"cannot read '{name}' of {scp.name}: {error or type(error).__name__}") from error
    if not found.size:
        raise DataError(f"'{name}' of {scp.name} has no numbers")
    if not np.isfinite(found).all():
        raise DataError(f"'{name}' of {scp.name} has values that are NaN or infinite")
    return found


@dataclass(frozen=True)
class ArkFrames:
    """Features in Kaldi's archives.

    Attributes:
        scp: its names are utterances or speakers.
        cmvn: an scp file with statistics of each speaker; their mean is subtracted.
    """

    scp: Path
    cmvn: Path | None = None

    def __call__(self, utterance: Utterance) -> NDArray[np.float32]:
        """The matrix or vector of the utterance, else of its speaker."""
        name = utterance.id if utterance.id in table_of(self.scp) else utterance.speaker
        frames = load(self.scp, name).astype(np.float32)
        if self.cmvn is None:
            return frames
        stats = load(self.cmvn, utterance.speaker)  # sums and the count; sums of squares
        return np.asarray(frames - stats[0, :-1] / stats[0, -1], dtype=np.float32)

    def fingerprint(self) -> str:
        """A string that changes with the scp files and the archives that they name."""
        return _fingerprint([path for path in (self.scp, self.cmvn) if path])


class ArkVectors(Mapping[str, NDArray[np.int32]]):
    """State numbers of the frames of each utterance, read on access."""

    def __init__(self, scps: tuple[Path, ...]) -> None:
        self._scps = scps
        self._scp_of = {name: scp for scp in scps for name in table_of(scp)}

    def __getitem__(self, name: str) -> NDArray[np.int32]:
        return load(self._scp_of[name], name).astype(np.int32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._scp_of)

    def __len__(self) -> int:
        return len(self._scp_of)

    def fingerprint(self) -> str:
        """A string that changes with the scp files and the archives that they name."""
        return _fingerprint(self._scps)


def _fingerprint(scps: Sequence[Path]) -> str:
    archives = {(scp, where.partition(":")[0]) for scp in scps for where in table_of(scp).values()}
    states = [state_of(located(scp, name)) for scp, name in sorted(archives)]
    return fingerprint(list(scps), [state_of(scp) for scp in scps], states)
