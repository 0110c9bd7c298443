"""A corpus: utterances with audio, speaker and text, and the problems that were found in it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import DataError
from roundelay.speech.segments import Segments

SPLITS = ("train", "valid", "test")
_ALIASES = {"dev": "valid", "val": "valid", "validation": "valid", "training": "train", "eval": "test"}


@dataclass(frozen=True)
class Utterance:
    """One piece of speech.

    Attributes:
        id: unique in the corpus.
        audio: the file; None if the corpus has only features.
        speaker: features are normalised per speaker.
        text: words with spaces between them.
        split: train, valid, test or another name.
        channel: of the file, counted from 0; None averages all channels.
        start_s: offset of the utterance in the file.
        duration_s: None means up to the end of the file.
        phones: phone times, if they are known.
        words: word times, if they are known.
        speed: the audio is played this many times as fast as recorded.
    """

    id: str
    audio: Path | None
    speaker: str
    text: str
    split: str
    channel: int | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    phones: Segments | None = None
    words: Segments | None = None
    speed: float = 1.0

    def faster(self, speed: float) -> Utterance:
        """A copy at another speed (Ko et al. 2015). It counts as another speaker, since pitch and formants move too."""
        name = f"sp{speed:g}"
        return dataclasses.replace(
            self,
            id=f"{name}-{self.id}",
            speaker=f"{name}-{self.speaker}",
            speed=self.speed * speed,
            phones=self.phones and self.phones.faster(speed),
            words=self.words and self.words.faster(speed),
        )


class Problems:
    """Problems of a corpus: one line for each case, counted by kind.

    >>> problems = Problems()
    >>> problems.add("missing audio", "u1: no file a.wav")
    >>> problems.add("missing audio", "u2: no file b.wav")
    >>> problems.summary()
    ['missing audio: 2, first u1: no file a.wav']
    """

    def __init__(self, cases: Iterable[tuple[str, str]] = ()) -> None:
        self.cases = [(kind, line) for kind, line in cases]

    def __len__(self) -> int:
        return len(self.cases)

    def add(self, kind: str, line: str) -> None:
        self.cases.append((kind, line))

    def counts(self) -> dict[str, int]:
        """Number of cases of each kind."""
        return dict(Counter(kind for kind, _ in self.cases))

    def write(self, path: Path) -> None:
        """Write one line for each case. Without cases the file is removed."""
        path.unlink(missing_ok=True)
        if self.cases:
            path.write_text("".join(f"{kind}: {line}\n" for kind, line in self.cases), encoding="utf-8")

    def summary(self) -> list[str]:
        """One line for each kind: the number of cases, and the first case."""
        first: dict[str, str] = {}
        for kind, line in self.cases:
            first.setdefault(kind, line)
        return [f"{kind}: {count}, first {first[kind]}" for kind, count in self.counts().items()]


class FrameSource(Protocol):
    """Features computed by another program. Must be picklable, since worker processes read them."""

    def __call__(self, utterance: Utterance) -> NDArray[np.float32]:
        """T×F features, or one vector of F for the whole utterance. Raises DataError if there are none."""

    def fingerprint(self) -> str:
        """A string that changes when the features may have changed."""


class StateSource(Protocol):
    """State numbers of the frames of each utterance, computed by another program."""

    def __contains__(self, id: object) -> bool:
        """Whether there are numbers for an utterance."""

    def __getitem__(self, id: str) -> NDArray[np.int32]:
        """One number per frame."""

    def fingerprint(self) -> str:
        """A string that changes when the numbers may have changed."""


@dataclass(frozen=True)
class Corpus:
    """Utterances, and what they share.

    Attributes:
        description: one sentence.
        lexicon: a pronunciation dictionary (a word and its phones on each line), if the corpus has one.
        frames: T×F features that replace our own, if the corpus has them.
        appended: further features (fMLLR, i-vectors), T×F or one vector per utterance; appended to `frames` or to our own.
        pdfs: the state number of each frame (Kaldi's pdfs), if the corpus has such alignments.
        tree: Kaldi's decision tree that defines the states of `pdfs`; phones.txt must be beside it.
        stm, glm: references and rules of NIST's scorer for the test split, if the corpus has them.
    """

    name: str
    utterances: tuple[Utterance, ...]
    description: str = ""
    lexicon: Path | None = None
    problems: Problems = field(default_factory=Problems, compare=False)
    frames: FrameSource | None = None
    appended: tuple[FrameSource, ...] = ()
    pdfs: StateSource | None = None
    tree: Path | None = None
    stm: Path | None = None
    glm: Path | None = None

    def __post_init__(self) -> None:
        if not self.utterances:
            raise DataError(f"corpus {self.name} has no usable utterance; {'; '.join(self.problems.summary())}")

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, id: str) -> Utterance:
        try:
            return self._by_id[id]
        except KeyError:
            raise DataError(f"corpus {self.name} has no utterance '{id}'") from None

    @cached_property
    def _by_id(self) -> dict[str, Utterance]:
        return {utterance.id: utterance for utterance in self.utterances}

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits; train, valid and test first."""
        found = {utterance.split for utterance in self.utterances}
        return (*(name for name in SPLITS if name in found), *sorted(found.difference(SPLITS)))

    def split(self, name: str) -> tuple[Utterance, ...]:
        """The utterances of one split. Raises DataError if the corpus has no such split."""
        found = tuple(utterance for utterance in self.utterances if utterance.split == name)
        if not found:
            raise DataError(f"corpus {self.name} has no split '{name}'; it has {', '.join(self.splits)}")
        return found

    @property
    def phone_set(self) -> tuple[str, ...]:
        """Phones that occur in the alignments, sorted."""
        aligned = (utterance.phones for utterance in self.utterances if utterance.phones)
        return tuple(sorted({phone for phones in aligned for phone in phones.symbols}))

    def replace(self, **changes: Any) -> Corpus:  # noqa: ANN401  # the fields of this class
        return dataclasses.replace(self, **changes)

    def realigned(self, phones: Mapping[str, Segments]) -> Corpus:
        """A copy with other phone times. Utterances without new phone times have none."""
        return self.replace(
            utterances=tuple(dataclasses.replace(each, phones=phones.get(each.id)) for each in self.utterances)
        )

    def speed_perturbed(self, speeds: Iterable[float]) -> Corpus:
        """A corpus that also has copies of the training utterances at other speeds."""
        copies = (utt.faster(speed) for speed in speeds for utt in self.utterances if utt.split == "train")
        return self.replace(utterances=(*self.utterances, *copies))


def split_name(text: str) -> str:
    """The name of a split in small letters; for other common names ours, such as valid for dev.

    >>> split_name("dev"), split_name("Train")
    ('valid', 'train')
    """
    name = text.strip().lower()
    return _ALIASES.get(name, name)
