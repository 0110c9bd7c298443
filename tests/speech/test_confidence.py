"""Confidences of words, against posteriors that are known."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("kaldi_decoder")

from tiny_speech import LEXICON

from roundelay.speech.confidence import UNKNOWN, shown_words, with_confidences
from roundelay.speech.decode import Hypothesis
from roundelay.speech.hmm import Monophones

TYING = Monophones(LEXICON.phones, states_per_phone=2)


def path(*phones, frames=4):
    """States of these phones, each with as many frames in each of its two states."""
    return np.concatenate([np.repeat([2 * TYING.number(p), 2 * TYING.number(p) + 1], frames) for p in phones])


def posteriors(states, probability):
    """The state of the path has `probability` in each frame, the other states share the rest."""
    rest = (1 - np.asarray(probability)) / (TYING.num_states - 1)
    table = np.repeat(np.broadcast_to(rest, len(states))[:, None], TYING.num_states, axis=1)
    table[np.arange(len(states)), states] = probability
    return np.log(table).astype(np.float32)


def test_a_confidence_is_the_geometric_mean_of_the_posteriors_of_the_words_phones():
    states = path("SIL", "t", "u", "SIL")
    probability = np.where(np.arange(len(states)) % 2, 0.9, 0.4)
    said = Hypothesis(("TWO",), states, 0.0, complete=True)
    found = with_confidences(said, posteriors(states, probability), LEXICON, TYING)
    of_phone = probability + (1 - probability) / (TYING.num_states - 1)  # both states of the phone count
    assert found.confidences == pytest.approx([np.exp(np.log(of_phone[8:24]).mean())], rel=1e-4)


def test_silence_around_a_word_does_not_count_and_words_that_fit_nothing_are_unknown():
    states = path("SIL", "t", "u", "a")
    probability = np.ones(len(states)) * 0.99
    probability[:8] = 1e-6  # silence
    probability[24:] = 0.01  # the second word
    said = Hypothesis(("TWO", "A"), states, 0.0, complete=True)
    found = with_confidences(said, posteriors(states, probability), LEXICON, TYING)
    assert found.confidences[0] > 0.98
    assert found.confidences[1] < 0.2
    assert shown_words(replace(found, confidences=(0.9, 0.05))) == ["TWO", UNKNOWN]


def test_without_words_there_are_no_confidences():
    nothing = Hypothesis((), path("SIL"), 0.0, complete=True)
    assert with_confidences(nothing, posteriors(path("SIL"), 0.9), LEXICON, TYING).confidences == ()
    assert shown_words(nothing) == []
