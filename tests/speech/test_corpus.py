"""Splits, lookup, realignment and speed perturbation of a corpus."""

from __future__ import annotations

import pytest

from roundelay.errors import DataError
from roundelay.speech.corpus import Corpus, Problems, Utterance
from roundelay.speech.segments import segments


@pytest.fixture
def corpus():
    phones = segments([("A", 0.0, 0.2), ("SIL", 0.2, 0.2)])
    return Corpus(
        "tiny",
        (
            Utterance("u1", None, "s1", "a", "train", phones=phones, words=segments([("a", 0.0, 0.2)])),
            Utterance("u2", None, "s2", "b", "test"),
            Utterance("u3", None, "s3", "b", "extra"),
        ),
    )


def test_splits_have_their_usual_order(corpus):
    assert corpus.splits == ("train", "test", "extra")
    assert [utterance.id for utterance in corpus.split("test")] == ["u2"]
    with pytest.raises(DataError, match="no split 'valid'; it has train, test, extra"):
        corpus.split("valid")


def test_utterances_are_found_by_id(corpus):
    assert corpus["u2"].speaker == "s2"
    with pytest.raises(DataError, match="no utterance 'u9'"):
        corpus["u9"]


def test_an_empty_corpus_says_what_happened_to_its_utterances():
    with pytest.raises(DataError, match=r"no usable utterance; missing file: 1, first u1: a\.wav"):
        Corpus("tiny", (), problems=Problems([("missing file", "u1: a.wav")]))


def test_realignment_replaces_phone_times(corpus):
    assert corpus.phone_set == ("A", "SIL")
    other = corpus.realigned({"u2": segments([("B", 0.0, 0.1)])})
    assert other.phone_set == ("B",)
    assert other["u1"].phones is None
    assert other["u1"].words == corpus["u1"].words
    assert corpus["u1"].phones is not None


def test_speed_perturbation_adds_copies_of_training_speech_only(corpus):
    more = corpus.speed_perturbed((0.5, 2.0))
    assert [utterance.id for utterance in more.utterances] == ["u1", "u2", "u3", "sp0.5-u1", "sp2-u1"]
    slow = more["sp0.5-u1"]
    assert (slow.speaker, slow.speed, slow.text) == ("sp0.5-s1", 0.5, "a")
    assert slow.phones.durations_s == (0.4, 0.4)
    assert slow.words.durations_s == (0.4,)
