"""Sentences use words of the lexicon, and spoken numbers have the right value."""

from __future__ import annotations

import numpy as np
import pytest

from roundelay.speech.synth.lexicon import DIGITS, TEENS, TENS, stressed, words
from roundelay.speech.synth.sentences import KINDS, cardinal, ordinal, sentence

VALUES = {word: number for number, word in enumerate((*words(DIGITS), *words(TEENS)))} | {
    word: 10 * number for number, word in enumerate(words(TENS), 2)
}


def value(said):
    """A number read from its words, as a child would."""
    total = part = 0
    for word in said:
        if word == "thousand":
            total, part = part * 1000, 0
        elif word == "hundred":
            part *= 100
        elif word != "and":
            part += VALUES[word]
    return total + part


def test_every_number_can_be_read_back():
    assert all(value(cardinal(number)) == number for number in range(10000))


def test_the_days_of_a_month_are_thirty_one_different_ones():
    days = [" ".join(ordinal(day)) for day in range(1, 32)]
    assert len(set(days)) == 31
    assert days[:3] + days[19:23] + days[28:] == [
        "first", "second", "third", "twentieth", "twenty first", "twenty second", "twenty third", "twenty ninth",
        "thirtieth", "thirty first",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", sorted(set(KINDS), key=lambda kind: kind.__name__))
def test_every_kind_uses_words_of_the_lexicon_only(kind):
    random = np.random.default_rng(0)
    for _ in range(300):
        said = kind(random)
        assert said
        assert all(word in stressed() for word in said), said


def test_sentences_cover_the_lexicon_and_hardly_repeat():
    random = np.random.default_rng(1)
    said = [sentence(random) for _ in range(5000)]
    assert {word for one in said for word in one} == set(stressed())
    assert len(set(said)) > 4000


def test_the_same_seed_says_the_same():
    assert sentence(np.random.default_rng([7, 3])) == sentence(np.random.default_rng([7, 3]))
