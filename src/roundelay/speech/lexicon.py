"""Words and their pronunciations.

>>> lexicon = Lexicon({"TWO": [("T", "UW")], "TO": [("T", "UW"), ("T", "AH")]})
>>> lexicon.phones
('SIL', 'AH', 'T', 'UW')
>>> lexicon.unknown(["TWO TOO"])
Counter({'TOO': 1})
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from roundelay.errors import SpeechError
from roundelay.speech.text_files import lines_of

Pronunciation = tuple[str, ...]
PronunciationCounts = Mapping[tuple[str, Pronunciation], float]
_UNSEEN = 0.5  # added to the count of every pronunciation, so that none is impossible
_VARIANT = re.compile(r"(?P<word>.+)\(\d+\)$")


@dataclass(frozen=True)
class Entry:
    """One pronunciation of one word.

    Attributes:
        mark: above 0 the disambiguation symbol after the phones; 0 is none.
        cost: −ln p, where the most frequent pronunciation of the word has p = 1.
    """

    word: str
    phones: Pronunciation
    mark: int = 0
    cost: float = 0.0


class Lexicon:
    """Words in sorted order, each with one or more pronunciations, and the name of the silence phone.

    Silence may occur between words but never inside one. Homophones are allowed: `entries()` marks them.
    `counts` says how often each pronunciation was heard in training; without it all of a word's pronunciations cost the same.
    """

    def __init__(
        self,
        pronunciations: Mapping[str, Iterable[Sequence[str]]],
        silence: str = "SIL",
        counts: PronunciationCounts | None = None,
    ) -> None:
        self.silence, self.counts = silence, counts or {}
        # dict.fromkeys drops repetitions and keeps the order: lexicons list the most likely pronunciation first.
        self._prons = {w: tuple(dict.fromkeys(map(tuple, prons))) for w, prons in sorted(pronunciations.items())}
        for word, prons in self._prons.items():
            _check(word, prons, silence)
        if not self._prons:
            raise SpeechError("a lexicon needs at least one word, got none")

    @classmethod
    def read(cls, path: str | Path, silence: str = "SIL") -> Lexicon:
        """Read a text file with one pronunciation per line: `WORD P1 P2 …`.

        Further pronunciations have lines of their own, as `WORD` again (Kaldi's lexicon.txt) or as `WORD(2)` (CMU, AN4).
        Entries that are only silence (Kaldi's `!SIL SIL`) are left out, since silence is optional between all words.
        Comments are lines that begin with `;;;` or `#`, and everything after ` # ` (CMU's dictionary).
        """
        prons: dict[str, list[Pronunciation]] = {}
        for number, line in enumerate(lines_of(path), start=1):
            if not line.strip() or line.startswith((";;;", "#")):
                continue
            word, *phones = line.partition(" # ")[0].split()
            if not phones:
                raise SpeechError(f"{path}:{number}: '{word}' has no phones; write: WORD PHONE PHONE …")
            variant = _VARIANT.match(word)
            if variant and variant["word"] in prons:
                word = variant["word"]
            if set(phones) != {silence}:
                prons.setdefault(word, []).append(tuple(phones))
        return cls(prons, silence)

    def with_counts(self, counts: PronunciationCounts) -> Lexicon:
        """The same words, with other counts of their pronunciations."""
        return Lexicon(self._prons, self.silence, counts)

    @property
    def words(self) -> tuple[str, ...]:
        """All words, sorted. The label of a word in graphs is its index here + 1."""
        return tuple(self._prons)

    @property
    def phones(self) -> tuple[str, ...]:
        """All phones: silence first, the others sorted."""
        return (self.silence, *sorted({p for prons in self._prons.values() for pron in prons for p in pron}))

    def __contains__(self, word: str) -> bool:
        return word in self._prons

    def __getitem__(self, word: str) -> tuple[Pronunciation, ...]:
        return self._prons[word]

    def __len__(self) -> int:
        return len(self._prons)

    def unknown(self, texts: Iterable[str]) -> Counter[str]:
        """Words of the transcripts that are not in the lexicon, and how often each occurs."""
        return Counter(word for text in texts for word in text.split() if word not in self._prons)

    def entries(self) -> tuple[Entry, ...]:
        """All pronunciations, with disambiguation symbols.

        With its symbol, no pronunciation equals another one or is the beginning of another one. Otherwise L ∘ G could not be
        determinised: TO and TWO sound alike, and CAR sounds like the beginning of CARD.
        """
        all_prons = [(word, pron) for word, prons in self._prons.items() for pron in prons]
        sounds = Counter(pron for _, pron in all_prons)
        beginnings = {pron[:k] for pron in sounds for k in range(1, len(pron))}
        used: Counter[Pronunciation] = Counter()
        entries = []
        for word, pron in all_prons:
            if sounds[pron] > 1 or pron in beginnings:
                used[pron] += 1
            entries.append(Entry(word, pron, used[pron], self._cost(word, pron)))
        return tuple(entries)

    def _cost(self, word: str, pron: Pronunciation) -> float:
        most = max(self.counts.get((word, each), 0) for each in self._prons[word])
        return math.log((most + _UNSEEN) / (self.counts.get((word, pron), 0) + _UNSEEN))

    @cached_property
    def num_marks(self) -> int:
        """Number of disambiguation symbols in `entries`."""
        return max(entry.mark for entry in self.entries())

    def write(self, path: str | Path) -> None:
        """Write the lexicon as Kaldi's lexicon.txt."""
        lines = [f"{e.word} {' '.join(e.phones)}\n" for e in self.entries()]
        Path(path).write_text("".join(lines), encoding="utf-8")


def _check(word: str, prons: tuple[Pronunciation, ...], silence: str) -> None:
    if not word or word.split() != [word] or word in {"<s>", "</s>", "<eps>"} or word.startswith("#"):
        raise SpeechError(f"'{word}' cannot be a word: spaces, a leading #, <s>, </s> and <eps> are not allowed")
    if not prons or any(not pron for pron in prons):
        raise SpeechError(f"'{word}' needs at least one phone in each pronunciation, got {list(prons)}")
    if any(silence in pron for pron in prons):
        raise SpeechError(f"'{word}' contains the silence phone '{silence}', which may only occur between words")
