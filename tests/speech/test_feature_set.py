"""Features of a corpus do not depend on the workers, are computed once, and again if anything changes."""

from __future__ import annotations

import dataclasses
import os
import pickle

import numpy as np
import pytest
from sounds import noise, save

from roundelay.errors import DataError
from roundelay.speech import feature_set
from roundelay.speech.corpus import Corpus, Utterance
from roundelay.speech.feature_set import features, features_key
from roundelay.speech.features import FeatureConfig, speaker_features


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))
    utterances = [
        Utterance(f"u{n}", save(tmp_path / f"u{n}.wav", noise(0.5 + n / 10, seed=n)), f"s{n % 3}", "", "train")
        for n in range(7)
    ]
    return Corpus("tiny", (*utterances, Utterance("gone", tmp_path / "gone.wav", "s0", "", "train")))


def test_each_utterance_is_a_view_of_one_mapped_array(corpus):
    made = features(corpus, workers=1)
    assert isinstance(made.frames_NF, np.memmap)
    assert len(made) == 7
    assert made.dimension == 120
    assert "gone" not in made
    assert made.problems.counts() == {"missing file": 1}
    speaker = [utterance for utterance in corpus.utterances if utterance.speaker == "s1"]
    alone = speaker_features(speaker, FeatureConfig())
    for id, frames in zip(alone.ids, alone.frames, strict=True):
        assert np.shares_memory(made[id], made.frames_NF)
        np.testing.assert_array_equal(made[id], frames)
    assert sum(len(made[id]) for id in made) == len(made.frames_NF)


def test_two_workers_write_the_same_file_as_one(corpus, tmp_path, monkeypatch):
    one = bytes(features(corpus, workers=1).frames_NF)
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "other"))
    assert bytes(features(corpus, workers=2).frames_NF) == one


def test_a_pickled_set_is_mapped_again(corpus):
    made = features(corpus, workers=1)
    sent = pickle.dumps(made)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert isinstance(again.frames_NF, np.memmap)
    np.testing.assert_array_equal(again["u3"], made["u3"])


def test_features_are_computed_once(corpus, monkeypatch):
    first = features(corpus, workers=1)
    monkeypatch.setattr(feature_set, "speaker_features", None)
    np.testing.assert_array_equal(features(corpus, workers=1).frames_NF, first.frames_NF)


def test_an_unfinished_computation_is_done_again(corpus, monkeypatch):
    monkeypatch.setattr(feature_set.json, "dumps", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        features(corpus, workers=1)
    monkeypatch.undo()
    monkeypatch.setenv("ROUNDELAY_CACHE", str(corpus.utterances[0].audio.parent / "cache"))
    assert len(features(corpus, workers=1)) == 7


def test_the_key_changes_with_everything_features_depend_on(corpus):
    default = FeatureConfig()
    keys = {features_key(corpus, default)}

    def expect_new(changed, config=default):
        before = len(keys)
        keys.add(features_key(changed, config))
        assert len(keys) == before + 1

    for config in (
        FeatureConfig(rate_Hz=8000),
        FeatureConfig(bins=23),
        FeatureConfig(deltas=False),
        FeatureConfig(cmvn=False),
    ):
        expect_new(corpus, config)
    first, *others = corpus.utterances
    for change in (
        {"channel": 1},
        {"start_s": 0.1},
        {"duration_s": 0.2},
        {"speaker": "x"},
        {"speed": 0.9},
        {"id": "y"},
    ):
        expect_new(corpus.replace(utterances=(dataclasses.replace(first, **change), *others)))

    class Source:
        def __init__(self, name):
            self.fingerprint = lambda: name

    expect_new(corpus.replace(frames=Source("a")))
    expect_new(corpus.replace(appended=(Source("a"),)))
    expect_new(corpus.replace(appended=(Source("b"),)))
    os.utime(first.audio, ns=(1, 1))
    expect_new(corpus)
    assert features_key(corpus.replace(description="told otherwise"), FeatureConfig()) in keys


def test_a_corpus_without_any_usable_file_is_refused_with_the_reason(corpus):
    with pytest.raises(DataError, match="no utterance of tiny is usable; missing file: 1, first gone"):
        features(corpus.replace(utterances=corpus.utterances[-1:]), workers=1)


def test_an_utterance_that_is_not_in_the_set_is_named(corpus):
    with pytest.raises(DataError, match="no features of 'gone'"):
        features(corpus, workers=1)["gone"]
