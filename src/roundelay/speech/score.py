"""Word error rate with its confidence interval, and the comparison of two systems.

    WER = (substitutions + deletions + insertions) / words of the reference

The interval is a bootstrap over utterances (Bisani and Ney, 2004): whole utterances are drawn with replacement, because errors
within an utterance depend on each other. Two systems are compared on the same draws, which gives a much narrower interval
than two separate bootstraps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import SpeechError
from roundelay.speech.libraries import library

Words = Sequence[str]
Pair = tuple[str, str]
GAP = "*"  # in an alignment of words: no word on this side; as icefall writes it
_DRAWS = 10_000
_AT_ONCE = 4_000_000  # draws × utterances held in memory at a time


@dataclass(frozen=True)
class UtteranceScore:
    """The alignment of reference and hypothesis of one utterance, as pairs of words; GAP on one side means no word there."""

    name: str
    pairs: tuple[Pair, ...]

    @property
    def reference(self) -> tuple[str, ...]:
        return tuple(word for word, _ in self.pairs if word != GAP)

    @property
    def hypothesis(self) -> tuple[str, ...]:
        return tuple(word for _, word in self.pairs if word != GAP)

    @property
    def errors(self) -> int:
        """Number of pairs that differ."""
        return sum(ref != hyp for ref, hyp in self.pairs)


class Interval(NamedTuple):
    """The 2.5 % and 97.5 % quantiles of bootstrap samples."""

    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """The errors of one system on one test set. Rates are fractions."""

    utterances: tuple[UtteranceScore, ...]

    @property
    def words(self) -> int:
        """Number of words of the reference."""
        return sum(len(u.reference) for u in self.utterances)

    @property
    def insertions(self) -> int:
        """Recognised words that are not in the reference."""
        return self._count(lambda ref, hyp: ref == GAP)

    @property
    def deletions(self) -> int:
        """Words of the reference that were not recognised."""
        return self._count(lambda ref, hyp: hyp == GAP)

    @property
    def substitutions(self) -> int:
        """Words that were recognised as another word."""
        return self._count(lambda ref, hyp: ref != hyp and GAP not in {ref, hyp})

    def _count(self, is_counted: Callable[[str, str], bool]) -> int:
        return sum(is_counted(*pair) for u in self.utterances for pair in u.pairs)

    @property
    def errors(self) -> int:
        """Insertions + deletions + substitutions."""
        return sum(u.errors for u in self.utterances)

    @property
    def wer(self) -> float:
        return self.errors / max(self.words, 1)

    @property
    def sentence_error(self) -> float:
        """The fraction of utterances with at least one error."""
        return sum(u.errors > 0 for u in self.utterances) / max(len(self.utterances), 1)

    def ci95(self, seed: int = 0) -> Interval:
        """The bootstrap interval of the word error rate."""
        errors, words = _errors_and_words(self)
        return _interval(_resampled(np.stack([errors, words]), seed))

    def to_json(self) -> dict[str, Any]:
        """All figures by name, with the interval."""
        names = ("wer", "words", "insertions", "deletions", "substitutions", "sentence_error")
        return {**{name: getattr(self, name) for name in names}, "ci95": list(self.ci95())}

    def __str__(self) -> str:
        low, high = self.ci95()
        return (
            f"WER {100 * self.wer:.2f} % [{100 * low:.2f}, {100 * high:.2f}] of {self.words} words: {self.insertions} ins, "
            f"{self.deletions} del, {self.substitutions} sub; "
            f"{100 * self.sentence_error:.1f} % of {len(self.utterances)} utterances"
        )


def score(references: Mapping[str, str | Words], hypotheses: Mapping[str, str | Words]) -> Score:
    """Align each hypothesis with its reference so that errors are fewest. Without a hypothesis all words are deletions.

    >>> result = score({"u1": "one two three"}, {"u1": "one too three four"})
    >>> result.substitutions, result.insertions, result.deletions, round(result.wer, 4)
    (1, 1, 0, 0.6667)
    """
    unpaired = sorted(set(hypotheses) - set(references))
    if unpaired:
        raise SpeechError(
            f"{len(unpaired)} hypotheses have no reference, e.g. '{unpaired[0]}'; score them against their own split"
        )
    return Score(
        tuple(
            UtteranceScore(name, _aligned(_words(reference), _words(hypotheses.get(name, ()))))
            for name, reference in sorted(references.items())
        )
    )


def confusions(result: Score) -> Counter[Pair]:
    """How often each word was recognised as another one. GAP on one side: an insertion or a deletion.

    >>> confusions(score({"u": "a b"}, {"u": "a c"}))
    Counter({('b', 'c'): 1})
    """
    return Counter(pair for utterance in result.utterances for pair in utterance.pairs if pair[0] != pair[1])


def errors_by_speaker(result: Score, speakers: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Errors and words of each speaker, the speaker with most errors first."""
    found: dict[str, dict[str, int]] = {}
    for utterance in result.utterances:
        of_speaker = found.setdefault(speakers[utterance.name], {"errors": 0, "words": 0})
        of_speaker["errors"] += utterance.errors
        of_speaker["words"] += len(utterance.reference)
    return dict(sorted(found.items(), key=lambda item: -item[1]["errors"]))


def examples(result: Score, number: int) -> list[UtteranceScore]:
    """At most `number` utterances with errors, evenly spread over all utterances with errors."""
    wrong = [utterance for utterance in result.utterances if utterance.errors]
    return wrong[:: max(1, len(wrong) // number)][:number] if number else []


def _words(text: str | Words) -> list[str]:
    return text.split() if isinstance(text, str) else list(text)


def _aligned(reference: list[str], hypothesis: list[str]) -> tuple[Pair, ...]:
    return tuple(library("kaldialign", "scoring").align(reference, hypothesis, GAP))


def _errors_and_words(result: Score) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    errors = np.array([u.errors for u in result.utterances], dtype=np.int64)
    words = np.array([len(u.reference) for u in result.utterances], dtype=np.int64)
    return errors, words


def _resampled(errors_then_words: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Bootstrap samples of Σ errors / Σ words. The counts of drawn utterances are multinomial."""
    total = errors_then_words.shape[1]
    if total == 0:
        return np.zeros(1)
    rng, even, at_once = np.random.default_rng(seed), np.full(total, 1 / total), max(1, _AT_ONCE // total)
    sums = [
        errors_then_words @ rng.multinomial(total, even, size=min(at_once, _DRAWS - done)).T
        for done in range(0, _DRAWS, at_once)
    ]
    errors, words = np.concatenate(sums, axis=1)
    return np.asarray(errors / np.maximum(words, 1), dtype=np.float64)


def _interval(samples: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(samples, [0.025, 0.975])
    return Interval(float(low), float(high))


class Difference(NamedTuple):
    """WER of the second system minus that of the first, with the interval of a paired bootstrap.

    `p_better` is the fraction of draws in which the second system has fewer errors (ties count half).
    """

    wer: float
    ci95: Interval
    p_better: float


def difference(first: Score, second: Score, seed: int = 0) -> Difference:
    """Compare two systems on the same utterances.

    >>> said = {"u1": "a b", "u2": "c d"}
    >>> difference(score(said, {"u1": "a x", "u2": "c x"}), score(said, said))
    Difference(wer=-0.5, ci95=Interval(low=-0.5, high=-0.5), p_better=1.0)
    """
    if [(u.name, u.reference) for u in first.utterances] != [(u.name, u.reference) for u in second.utterances]:
        raise SpeechError("two systems can only be compared on the same utterances, and their references differ")
    (errors_1, words), (errors_2, _) = _errors_and_words(first), _errors_and_words(second)
    draws = _resampled(np.stack([errors_2 - errors_1, words]), seed)
    p_better = float(np.mean(draws < 0) + np.mean(draws == 0) / 2)
    return Difference(second.wer - first.wer, _interval(draws), p_better)
