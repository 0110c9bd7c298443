"""Word error rate, how sure one may be of it, and the files in which the field keeps it.

    WER = (substitutions + deletions + insertions) / words of the reference

The interval is a bootstrap over utterances (Bisani and Ney, 2004): utterances are drawn with replacement, for errors within one
depend on each other. Two systems are compared on the same draws, which is far sharper than two intervals side by side.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import MissingExtraError, SpeechError

Words = Sequence[str]
Pair = tuple[str, str]
_GAP = "*"  # in an alignment: nothing on this side; as icefall writes it
_DRAWS = 10_000
_AT_ONCE = 4_000_000  # numbers held in memory while drawing


@dataclass(frozen=True)
class UtteranceScore:
    """One utterance's alignment of reference and hypothesis, as pairs of words; `*` stands for none."""

    name: str
    pairs: tuple[Pair, ...]

    @property
    def reference(self) -> tuple[str, ...]:
        """What was said."""
        return tuple(word for word, _ in self.pairs if word != _GAP)

    @property
    def hypothesis(self) -> tuple[str, ...]:
        """What was recognised."""
        return tuple(word for _, word in self.pairs if word != _GAP)

    @property
    def errors(self) -> int:
        """Pairs that differ."""
        return sum(said != heard for said, heard in self.pairs)


class Interval(NamedTuple):
    """The 2.5 % and 97.5 % quantiles of a bootstrap."""

    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """The result of one system on one test set; rates are fractions."""

    utterances: tuple[UtteranceScore, ...]

    @property
    def words(self) -> int:
        """Words of the reference."""
        return sum(len(u.reference) for u in self.utterances)

    @property
    def insertions(self) -> int:
        """Words that nobody said."""
        return self._count(lambda said, heard: said == _GAP)

    @property
    def deletions(self) -> int:
        """Words that were missed."""
        return self._count(lambda said, heard: heard == _GAP)

    @property
    def substitutions(self) -> int:
        """Words taken for others."""
        return self._count(lambda said, heard: said != heard and _GAP not in {said, heard})

    def _count(self, is_such: Callable[[str, str], bool]) -> int:
        return sum(is_such(*pair) for u in self.utterances for pair in u.pairs)

    @property
    def errors(self) -> int:
        """Insertions, deletions and substitutions."""
        return sum(u.errors for u in self.utterances)

    @property
    def wer(self) -> float:
        """Word error rate."""
        return self.errors / max(self.words, 1)

    @property
    def sentence_error(self) -> float:
        """The share of utterances with any error."""
        return sum(u.errors > 0 for u in self.utterances) / max(len(self.utterances), 1)

    def ci95(self, seed: int = 0) -> Interval:
        """The bootstrap interval of the word error rate."""
        errors, words = _tables(self)
        return _interval(_resampled(np.stack([errors, words]), seed))

    def to_json(self, seed: int = 0) -> dict[str, Any]:
        """All figures by name."""
        names = ("wer", "words", "insertions", "deletions", "substitutions", "sentence_error")
        return {**{name: getattr(self, name) for name in names}, "ci95": list(self.ci95(seed))}

    def __str__(self) -> str:
        low, high = self.ci95()
        return (
            f"WER {100 * self.wer:.2f} % [{100 * low:.2f}, {100 * high:.2f}] of {self.words} words: {self.insertions} ins, "
            f"{self.deletions} del, {self.substitutions} sub; "
            f"{100 * self.sentence_error:.1f} % of {len(self.utterances)} utterances"
        )


def score(references: Mapping[str, str | Words], hypotheses: Mapping[str, str | Words]) -> Score:
    """Align each hypothesis with its reference, at the fewest errors; an utterance without hypothesis is all deletions.

    >>> result = score({"u1": "one two three"}, {"u1": "one too three four"})
    >>> result.substitutions, result.insertions, result.deletions, round(result.wer, 4)
    (1, 1, 0, 0.6667)
    """
    strange = sorted(set(hypotheses) - set(references))
    if strange:
        raise SpeechError(
            f"{len(strange)} hypotheses have no reference, e.g. '{strange[0]}'; score them against their own split"
        )
    return Score(
        tuple(
            UtteranceScore(name, _aligned(_words(said), _words(hypotheses.get(name, ()))))
            for name, said in sorted(references.items())
        )
    )


def _words(text: str | Words) -> list[str]:
    return text.split() if isinstance(text, str) else list(text)


def _aligned(said: list[str], heard: list[str]) -> tuple[Pair, ...]:
    try:
        import kaldialign
    except ImportError as error:
        raise MissingExtraError("scoring", "speech") from error
    return tuple(kaldialign.align(said, heard, _GAP))


def _tables(result: Score) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    errors = np.array([u.errors for u in result.utterances], dtype=np.int64)
    words = np.array([len(u.reference) for u in result.utterances], dtype=np.int64)
    return errors, words


def _resampled(errors_then_words: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Σ errors / Σ words over utterances drawn with replacement; how often each is drawn is multinomial."""
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
    """WER of the second system minus that of the first, with the paired bootstrap's interval.

    `p_better` is the share of draws in which the second system has fewer errors (ties count half).
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
        raise SpeechError("two systems can be compared on the same utterances only; their references differ")
    (errors_1, words), (errors_2, _) = _tables(first), _tables(second)
    draws = _resampled(np.stack([errors_2 - errors_1, words]), seed)
    p_better = float(np.mean(draws < 0) + np.mean(draws == 0) / 2)
    return Difference(second.wer - first.wer, _interval(draws), p_better)


def write_scores(folder: str | Path, suffix: str, result: Score) -> tuple[Path, Path]:
    """`recogs-SUFFIX.txt` with reference and hypothesis of each utterance, `errs-SUFFIX.txt` with what went wrong."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    recogs, errs = folder / f"recogs-{suffix}.txt", folder / f"errs-{suffix}.txt"
    with recogs.open("w", encoding="utf-8") as file:
        for u in result.utterances:
            file.write(f"{u.name}:\tref={list(u.reference)}\n{u.name}:\thyp={list(u.hypothesis)}\n")
    errs.write_text(_error_report(result), encoding="utf-8")
    return recogs, errs


def read_recogs(path: str | Path) -> Score:
    """The score whose `recogs-*.txt` this is, so that finished runs can be compared without decoding them again."""
    texts: dict[str, dict[str, list[str]]] = {"ref": {}, "hyp": {}}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            name, _, text = line.rpartition(":\t")
            side, _, words = text.partition("=")
            texts[side][name] = ast.literal_eval(words)
        except (KeyError, ValueError, SyntaxError) as error:
            raise SpeechError(f"{path}:{number} is no line of transcripts: '{line}'") from error
    return score(texts["ref"], texts["hyp"])


def _error_report(result: Score) -> str:
    low, high = result.ci95()
    lines = [
        f"%WER {100 * result.wer:.2f} [{result.errors} / {result.words}, {result.insertions} ins, {result.deletions} del, "
        f"{result.substitutions} sub ]",
        f"%SER {100 * result.sentence_error:.2f}",
        f"95 % interval of the WER: {100 * low:.2f} to {100 * high:.2f}",
        "",
        "PER-UTT DETAILS: corr or (ref->hyp)",
        *(f"{u.name}:\t{_marked(u)}" for u in result.utterances),
    ]
    pairs = Counter(pair for u in result.utterances for pair in u.pairs if pair[0] != pair[1])
    for title, keep in (
        ("SUBSTITUTIONS: count ref -> hyp", lambda said, heard: _GAP not in {said, heard}),
        ("DELETIONS: count ref", lambda said, heard: heard == _GAP),
        ("INSERTIONS: count hyp", lambda said, heard: said == _GAP),
    ):
        chosen = sorted((-count, pair) for pair, count in pairs.items() if keep(*pair))
        lines += ["", title, *(f"{-count}   {_arrow(pair)}" for count, pair in chosen)]
    return "\n".join([*lines, "", *_per_word(result)]) + "\n"


def _marked(utterance: UtteranceScore) -> str:
    return " ".join(said if said == heard else f"({said}->{heard})" for said, heard in utterance.pairs)


def _arrow(pair: Pair) -> str:
    return " -> ".join(word for word in pair if word != _GAP)


def _per_word(result: Score) -> list[str]:
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for u in result.utterances:
        for said, heard in u.pairs:
            (right if said == heard else wrong)[said if said != _GAP else heard] += 1
    rows = sorted((-wrong[word], word) for word in {*right, *wrong})
    return ["PER-WORD: word corr errs", *(f"{word}   {right[word]} {-errors}" for errors, word in rows)]
