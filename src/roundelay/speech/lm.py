"""N-gram language models: counted here, or read from anyone's ARPA file.

Both estimators interpolate with the next shorter history down to a uniform distribution over the vocabulary, so that every
word of the lexicon has some probability, and every history sums to one:

    Witten-Bell   p(w|h) = (c(h,w) + T(h)·p(w|h')) / (c(h) + T(h))              T(h): distinct words seen after h
    Kneser-Ney    p(w|h) = (c(h,w) − D(c))/c(h) + γ(h)·p(w|h')                  γ(h): the mass that the discounts D free

where h' is h without its oldest word. Kneser-Ney is the modified one of Chen and Goodman (1998): three discounts per order, and
below the highest order c counts distinct left neighbours instead of occurrences.

>>> lm = ngram(["A B", "A C"], order=2, vocabulary=["A", "B", "C", "D"])
>>> round(10 ** lm.log10_prob("A", ("<s>",)), 4)
0.76
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from roundelay.errors import SpeechError, unknown
from roundelay.speech.text_files import lines_of

BEGIN, END = "<s>", "</s>"
_NEVER = -99.0  # how ARPA files say that <s> is never predicted
_LEAST = (
    0.1  # of a count: what a discount takes at least, and leaves at least, where few data make its formula degenerate
)

Gram = tuple[str, ...]


class Scored(NamedTuple):
    """log10 of a gram's probability, and of the weight by which shorter histories enter when it is a history."""

    log10_prob: float
    log10_backoff: float = 0.0


class Perplexity(NamedTuple):
    """exp of the mean negative log probability per token; a token is a known word or the end of a sentence."""

    perplexity: float
    tokens: int
    unknown: int


@dataclass(frozen=True)
class NGram:
    """An n-gram model in ARPA's terms: p(w|h) is written down, or backoff(h)·p(w|h')."""

    grams: tuple[dict[Gram, Scored], ...]  # grams[k] has those of k + 1 words

    @property
    def order(self) -> int:
        """Length of the longest grams."""
        return len(self.grams)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All words that can be predicted, without the end of a sentence; sorted."""
        return tuple(sorted(word for (word,) in self.grams[0] if word not in {BEGIN, END}))

    def log10_prob(self, word: str, history: Sequence[str] = ()) -> float:
        """log10 p(word | history), from the longest history that the model knows.

        Raises SpeechError for a word outside the vocabulary.
        """
        h = tuple(history)[max(0, len(history) - self.order + 1) :]
        backoff = 0.0
        while (*h, word) not in self.grams[len(h)]:
            if not h:
                raise SpeechError(f"'{word}' is not in the language model's vocabulary of {len(self.vocabulary)} words")
            backoff += self.grams[len(h) - 1].get(h, Scored(0.0)).log10_backoff
            h = h[1:]
        return backoff + self.grams[len(h)][(*h, word)].log10_prob

    def perplexity(self, texts: Iterable[str]) -> Perplexity:
        """How surprising some sentences are; unknown words are skipped and counted."""
        total, tokens, unknown_words = 0.0, 0, 0
        for text in texts:
            history: Gram = (BEGIN,)
            for word in (*text.split(), END):
                if (word,) in self.grams[0]:
                    total += self.log10_prob(word, history)
                    tokens += 1
                else:
                    unknown_words += 1
                history = (*history, word)
        return Perplexity(10 ** (-total / max(tokens, 1)), tokens, unknown_words)

    def write(self, path: str | Path) -> None:
        """The ARPA file."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.write("\\data\\\n")
            file.writelines(f"ngram {k}={len(grams)}\n" for k, grams in enumerate(self.grams, start=1))
            for k, grams in enumerate(self.grams, start=1):
                file.write(f"\n\\{k}-grams:\n")
                file.writelines(_arpa_line(gram, scored, self.order) for gram, scored in sorted(grams.items()))
            file.write("\n\\end\\\n")

    @classmethod
    def read(cls, path: str | Path) -> NGram:
        """Anyone's ARPA file; what stands before its data mark is a comment, which may well describe sections."""
        grams: list[dict[Gram, Scored]] = []
        started = False
        for number, line in enumerate(lines_of(path), start=1):
            text = line.strip()
            if not started:
                started = text == "\\data\\"
            elif text.endswith("-grams:"):
                grams.append({})
            elif text == "\\end\\":
                break
            elif grams and text:
                gram, scored = _parsed(text.split(), len(grams), f"{path}:{number}")
                grams[-1][gram] = scored
        if not grams or not grams[0]:
            raise SpeechError(f"{path} is no ARPA file: it has no \\data\\ with \\1-grams: below")
        return cls(tuple(grams))


def _arpa_line(gram: Gram, scored: Scored, order: int) -> str:
    backoff = f"\t{scored.log10_backoff:.7f}" if len(gram) < order and gram[-1] != END else ""
    return f"{scored.log10_prob:.7f}\t{' '.join(gram)}{backoff}\n"


def _parsed(fields: list[str], order: int, where: str) -> tuple[Gram, Scored]:
    try:
        scores = [float(fields[0]), *map(float, fields[order + 1 :])]
        log10_prob, log10_backoff = (*scores, 0.0)[:2]
    except (ValueError, IndexError):
        raise SpeechError(
            f"{where}: expected 'log10_prob word×{order} [log10_backoff]', got '{' '.join(fields)}'"
        ) from None
    if len(fields) not in {order + 1, order + 2}:
        raise SpeechError(f"{where}: a {order}-gram has {order} words, got '{' '.join(fields)}'")
    return tuple(fields[1 : order + 1]), Scored(log10_prob, log10_backoff)


Counts = list[Counter[Gram]]  # counts[k] has grams of k + 1 words


def count_grams(texts: Iterable[str], order: int) -> Counts:
    """Occurrences of all grams of 1 … order words in sentences with <s> and </s> around them."""
    counts: Counts = [Counter() for _ in range(order)]
    for text in texts:
        words = (BEGIN, *text.split(), END)
        for k in range(order):
            counts[k].update(words[i : i + k + 1] for i in range(len(words) - k))
    return counts


@dataclass(frozen=True)
class _Share:
    """What a history keeps for the words seen after it, and what it leaves to shorter histories."""

    seen: dict[str, float]
    left: float


_Sharing = Callable[[dict[str, int]], _Share]


def _witten_bell(counts: Counts) -> list[_Sharing]:
    def share(after: dict[str, int]) -> _Share:
        total = sum(after.values()) + len(after)
        return _Share({w: c / total for w, c in after.items()}, len(after) / total)

    return [share] * len(counts)


def _kneser_ney(counts: Counts) -> list[_Sharing]:
    return [_discounting(_discounts(Counter(grams.values()))) for grams in counts]


def _discounts(of_counts: Counter[int]) -> tuple[float, float, float]:
    """D_1, D_2, D_3+ = i − (i+1)·Y·n_{i+1}/n_i, Y = n_1/(n_1 + 2n_2)   (Chen & Goodman 1998), kept inside (0, i)."""
    n = [of_counts[i] for i in range(5)]
    y = n[1] / (n[1] + 2 * n[2]) if n[1] else 0.0
    raw = [i - (i + 1) * y * n[i + 1] / n[i] if n[i] else y for i in (1, 2, 3)]
    d1, d2, d3 = (min(max(d, _LEAST), i - _LEAST) for i, d in enumerate(raw, start=1))
    return d1, d2, d3


def _discounting(discounts: tuple[float, float, float]) -> _Sharing:
    def share(after: dict[str, int]) -> _Share:
        total = sum(after.values())
        freed = {w: discounts[min(c, 3) - 1] for w, c in after.items()}
        return _Share({w: (c - freed[w]) / total for w, c in after.items()}, sum(freed.values()) / total)

    return share


def _continuations(counts: Counts) -> Counts:
    """Below the highest order, how many different words stand to the left; grams at a sentence's begin keep their counts."""
    adjusted: Counts = []
    for shorter, longer in pairwise(counts):
        lefts: Counter[Gram] = Counter(gram[1:] for gram in longer)
        adjusted.append(Counter({gram: c if gram[0] == BEGIN else lefts[gram] for gram, c in shorter.items()}))
    return [*adjusted, counts[-1]]


_SMOOTHINGS = {"witten-bell": _witten_bell, "kneser-ney": _kneser_ney}


def ngram(texts: Iterable[str], order: int, vocabulary: Iterable[str], smoothing: str = "witten-bell") -> NGram:
    """An n-gram model of `order` from sentences; all of `vocabulary` can be predicted, other words in the texts are refused.

    Raises SpeechError when a sentence has a word outside the vocabulary, or for an unknown smoothing.
    """
    if smoothing not in _SMOOTHINGS:
        raise SpeechError(unknown("smoothing", smoothing, _SMOOTHINGS))
    if order < 1:
        raise SpeechError(f"the order of an n-gram model is at least 1, got {order}")
    predicted = sorted({*vocabulary, END} - {BEGIN})
    raw = count_grams(texts, order)
    strange = {word for (word,) in raw[0]} - {*predicted, BEGIN}
    if strange:
        raise SpeechError(
            f"sentences have {len(strange)} words outside the vocabulary, e.g. '{min(strange)}'; leave those out"
        )
    counts = _continuations(raw) if smoothing == "kneser-ney" else raw
    counts[0].pop((BEGIN,), None)  # nothing ever predicts it
    return _interpolated(counts, _SMOOTHINGS[smoothing](counts), predicted)


def _interpolated(counts: Counts, shares: list[_Sharing], predicted: list[str]) -> NGram:
    """p(w|h) = seen(h,w) + left(h)·p(w|h') from short histories to long; left(h) becomes the backoff weight of h."""
    probs: list[dict[Gram, float]] = []
    left: dict[Gram, float] = {}
    for k, grams in enumerate(counts):
        after: dict[Gram, dict[str, int]] = defaultdict(dict)
        for gram, count in grams.items():
            after[gram[:-1]][gram[-1]] = count
        level: dict[Gram, float] = {}
        if k == 0:
            share = shares[0](after[()]) if after else _Share({}, 1.0)
            level = {(word,): share.seen.get(word, 0.0) + share.left / len(predicted) for word in predicted}
        else:
            for history, words in after.items():
                share = shares[k](words)
                left[history] = share.left
                for word, seen in share.seen.items():
                    level[(*history, word)] = seen + share.left * probs[k - 1][(*history[1:], word)]
        probs.append(level)
    if len(counts) > 1:
        probs[0][(BEGIN,)] = 10**_NEVER
    return NGram(tuple({gram: _scored(p, left.get(gram, 1.0)) for gram, p in level.items()} for level in probs))


def _scored(prob: float, backoff: float) -> Scored:
    return Scored(math.log10(prob), math.log10(backoff))
