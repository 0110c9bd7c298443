"""AN4 as it is: counts by the README of the archive, times that fit the audio, features that fit the times."""

from __future__ import annotations

import os

import numpy as np
import pytest

from roundelay.errors import DataError
from roundelay.speech.audio import utterance_audio
from roundelay.speech.corpora.an4 import an4
from roundelay.speech.features import FeatureConfig, log_mel, speaker_features
from roundelay.speech.hmm import Monophones, frame_labels


@pytest.fixture(scope="module")
def corpus():
    if not os.environ.get("ROUNDELAY_DATA"):
        pytest.skip("AN4 is not here: ROUNDELAY_DATA is not set")
    try:
        return an4()
    except DataError as error:
        pytest.skip(f"AN4 is not here: {error}")


def test_splits_and_speakers_are_those_of_the_readme(corpus):
    sizes = {name: corpus.split(name) for name in corpus.splits}
    assert {name: len(utterances) for name, utterances in sizes.items()} == {"train": 742, "valid": 103, "test": 103}
    speakers = {name: {utterance.speaker for utterance in utterances} for name, utterances in sizes.items()}
    assert {name: len(found) for name, found in speakers.items()} == {"train": 58, "valid": 8, "test": 8}
    assert not speakers["train"] & (speakers["valid"] | speakers["test"])


def test_only_what_has_no_alignment_is_a_problem(corpus):
    assert corpus.problems.counts() == {"not aligned": 56}
    assert sum(utterance.phones is not None for utterance in corpus.utterances) == 948 - 56
    assert len(corpus.phone_set) == 34
    assert corpus.lexicon.is_file()


def test_phones_are_louder_than_the_silence_around_them(corpus):
    phones = ("SIL", *(phone for phone in corpus.phone_set if phone != "SIL"))
    tying = Monophones(phones)
    vowels = [phones.index(vowel) for vowel in ("IY", "EY", "EH", "AY")]
    quiet, loud = [], []
    for utterance in corpus.split("test")[::10]:
        if utterance.phones:
            energy_T = log_mel(utterance_audio(utterance, 16000).samples, 16000).mean(axis=1)
            phone_T = tying.phone_of_state[frame_labels(utterance.phones, len(energy_T), tying)]
            quiet.append(energy_T[phone_T == 0])
            loud.append(energy_T[np.isin(phone_T, vowels)])
    assert np.concatenate(loud).mean() > np.concatenate(quiet).mean() + 3


def test_phone_times_cover_all_frames_but_the_last_few(corpus):
    utterances = [utterance for utterance in corpus.split("valid")[:20] if utterance.phones]
    found = speaker_features(utterances, FeatureConfig())
    assert found.problems == []
    for utterance, frames_TF in zip(utterances, found.frames, strict=True):
        assert abs(round(utterance.phones.end_s * 100) - len(frames_TF)) <= 2
