"""The times of recognised words, from the state of every frame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from roundelay.speech.decode import Hypothesis
from roundelay.speech.hmm import Tying, phone_segments
from roundelay.speech.lexicon import Lexicon, Pronunciation
from roundelay.speech.segments import Ints, Segments, segments

COUNTED = 20_000  # utterances that are enough to count pronunciations


def word_times(hypothesis: Hypothesis, lexicon: Lexicon, tying: Tying) -> Segments:
    """The times of recognised words: the phones of the path are matched with the pronunciations of its words.

    The output labels of the graph do not give the times, because determinisation moves them along the phones. If the search
    ended inside a word, words that cannot be matched are put at the end with no duration.
    """
    phones = phone_segments(hypothesis.states_T, tying)
    spans = _spans(
        hypothesis.words, phones.symbols, _with_first_variants(hypothesis.words, lexicon, tying), lexicon.silence
    )
    begins = (*map(float, phones.starts_s), float(phones.end_s))
    times = [(begins[i], begins[j]) for i, j in spans]
    times += [(phones.end_s, phones.end_s)] * (len(hypothesis.words) - len(times))
    return segments((word, i, round(j - i, 6)) for word, (i, j) in zip(hypothesis.words, times, strict=True))


def pronunciation_counts(
    labels: Mapping[str, Ints], texts: Mapping[str, str], lexicon: Lexicon, tying: Tying
) -> Counter[tuple[str, Pronunciation]]:
    """How often each pronunciation occurs in labelled utterances, by matching the phones of the labels with the text."""
    counts: Counter[tuple[str, Pronunciation]] = Counter()
    for name, states_T in islice(labels.items(), COUNTED):
        words = texts[name].split()
        if lexicon.unknown(words):
            continue
        phones, variants = phone_segments(states_T, tying).symbols, _with_first_variants(words, lexicon, tying)
        for word, (i, j) in zip(words, _spans(words, phones, variants, lexicon.silence), strict=False):
            counts[word, lexicon[word][variants[word].index(phones[i:j])]] += 1
    return counts


def _with_first_variants(words: Sequence[str], lexicon: Lexicon, tying: Tying) -> dict[str, list[tuple[str, ...]]]:
    """Pronunciations of the words. If variants of a phone share states, the phone is replaced by the first variant."""
    first_variant: dict[str, str] = {}
    for phone in {phone for word in words for pronunciation in lexicon[word] for phone in pronunciation}:
        state = tying.chains(0, tying.number(phone), 0)[0]
        first_variant[phone] = tying.phones[tying.phone_of_state[state]]
    return {word: [tuple(first_variant[phone] for phone in each) for each in lexicon[word]] for word in words}


def _spans(
    words: Sequence[str], phones: Sequence[str], lexicon: Mapping[str, Sequence[tuple[str, ...]]], silence: str
) -> list[tuple[int, int]]:
    """A pair (i, j) for each word: phones[i:j] is one of its pronunciations, and only silence lies between words."""
    reached: list[dict[int, int]] = [{0: 0}]  # after each word so far: its possible ends, each with its begin
    for word in words:
        ends: dict[int, int] = {}
        for before in reached[-1]:
            for i in _after_silence(before, phones, silence):
                ends.update({i + len(p): i for p in lexicon[word] if tuple(phones[i : i + len(p)]) == p})
        if not ends:
            break
        reached.append(ends)
    spans: list[tuple[int, int]] = []
    end = max(reached[-1])
    for k in range(len(reached) - 1, 0, -1):
        begin = reached[k][end]
        spans.append((begin, end))
        end = begin if begin in reached[k - 1] else begin - 1
    return spans[::-1]


def _after_silence(index: int, phones: Sequence[str], silence: str) -> tuple[int, ...]:
    """Where the next word may begin: at `index`, or after the silence there."""
    return (index, index + 1) if index < len(phones) and phones[index] == silence else (index,)
