"""Estimating n-gram language models from sentences.

Both estimators interpolate with the next shorter history down to a uniform distribution over the vocabulary, so that every
word of the vocabulary has a probability above 0, and the probabilities after every history sum to one:

    Witten-Bell   p(w|h) = (c(h,w) + T(h)·p(w|h')) / (c(h) + T(h))              T(h): distinct words seen after h
    Kneser-Ney    p(w|h) = (c(h,w) − D(c))/c(h) + γ(h)·p(w|h')                  γ(h): the mass that the discounts D free

where h' is h without its oldest word. Kneser-Ney is the modified form of Chen and Goodman (1998): three discounts per order, and
below the highest order c counts distinct left neighbours instead of occurrences.

>>> lm = ngram(["A B", "A C"], order=2, vocabulary=["A", "B", "C", "D"])
>>> round(10 ** lm.log10_prob("A", ("<s>",)), 4)
0.76
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from roundelay.errors import SpeechError, unknown
from roundelay.speech.lm import BEGIN, END, Gram, NGram, Scored

_NEVER = -99.0  # log10 probability of <s> in ARPA files, since it is never predicted
_LEAST = 0.1  # a discount takes at least this part of a count, and leaves at least this part

Counts = list[Counter[Gram]]  # counts[k]: n-grams of k + 1 words


def count_grams(texts: Iterable[str], order: int) -> Counts:
    """Occurrences of all n-grams of 1 … order words, in sentences between <s> and </s>."""
    counts: Counts = [Counter() for _ in range(order)]
    for text in texts:
        words = (BEGIN, *text.split(), END)
        for k in range(order):
            counts[k].update(words[i : i + k + 1] for i in range(len(words) - k))
    return counts


@dataclass(frozen=True)
class _Share:
    """Probabilities of the words seen after a history, and the mass left to the next shorter history."""

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
    """Kneser-Ney counts: below the highest order, the number of different left neighbours. N-grams with <s> keep their counts."""
    adjusted: Counts = []
    for shorter, longer in pairwise(counts):
        lefts: Counter[Gram] = Counter(gram[1:] for gram in longer)
        adjusted.append(Counter({gram: c if gram[0] == BEGIN else lefts[gram] for gram, c in shorter.items()}))
    return [*adjusted, counts[-1]]


_SMOOTHINGS = {"witten-bell": _witten_bell, "kneser-ney": _kneser_ney}


def ngram(texts: Iterable[str], order: int, vocabulary: Iterable[str], smoothing: str = "witten-bell") -> NGram:
    """An n-gram model of `order` from sentences, which predicts all words of `vocabulary`.

    Raises SpeechError if a sentence has a word outside the vocabulary, and for an unknown smoothing.
    """
    if smoothing not in _SMOOTHINGS:
        raise SpeechError(unknown("smoothing", smoothing, _SMOOTHINGS))
    if order < 1:
        raise SpeechError(f"the order of an n-gram model must be at least 1, got {order}")
    predicted = sorted({*vocabulary, END} - {BEGIN})
    raw = count_grams(texts, order)
    unknown_words = {word for (word,) in raw[0]} - {*predicted, BEGIN}
    if unknown_words:
        raise SpeechError(
            f"sentences have {len(unknown_words)} words outside the vocabulary, e.g. '{min(unknown_words)}'; "
            "leave those sentences out"
        )
    counts = _continuations(raw) if smoothing == "kneser-ney" else raw
    counts[0].pop((BEGIN,), None)  # <s> is never predicted
    return _interpolated(counts, _SMOOTHINGS[smoothing](counts), predicted)


def _interpolated(counts: Counts, shares: list[_Sharing], predicted: list[str]) -> NGram:
    """p(w|h) = seen(h,w) + left(h)·p(w|h'), shorter histories first; left(h) is the backoff weight of h."""
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
