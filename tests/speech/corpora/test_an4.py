"""AN4: the counts in the archive's README, times that fit the audio, features that fit the times."""

from __future__ import annotations

import os

import numpy as np
import pytest
from sounds import noise, save

from roundelay.errors import DataError
from roundelay.speech.audio import utterance_audio
from roundelay.speech.corpora.an4 import an4
from roundelay.speech.describe import summary
from roundelay.speech.features import FeatureConfig, log_mel, speaker_features
from roundelay.speech.hmm import Monophones, frame_labels
from roundelay.speech.lexicon import Lexicon


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


@pytest.fixture
def cmus(tmp_path, monkeypatch):
    """A miniature of an4_sphere.tar.gz."""
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "an4"
    (root / "etc").mkdir(parents=True)
    train = {"an251-fash-b": "<s> YES </s>", "an253-fash-b": "<s> GO </s>", "cen5-mblw-b": "<s> GO YES </s>"}
    for name in train:
        save(root / "wav" / "an4_clstk" / name.split("-")[1] / f"{name}.sph", noise(0.5))
    save(root / "wav" / "an4test_clstk" / "fcaw" / "an406-fcaw-b.sph", noise(0.5))
    (root / "etc" / "an4_train.transcription").write_text("".join(f"{text} ({id})\n" for id, text in train.items()))
    (root / "etc" / "an4_test.transcription").write_text("GO GO (an406-fcaw-b)\nYES (an407-fcaw-b)\n")
    (root / "etc" / "an4.dic").write_text("GO  G OW\nYES  Y EH S\n")
    return root


def test_the_corpus_as_cmu_ships_it_is_read(cmus):
    corpus = an4(cmus)
    assert [(each.id, each.split, each.speaker, each.text) for each in corpus.utterances] == [
        ("an251-fash-b", "train", "fash", "YES"),
        ("an253-fash-b", "train", "fash", "GO"),
        ("cen5-mblw-b", "valid", "mblw", "GO YES"),
        ("an406-fcaw-b", "test", "fcaw", "GO GO"),
        ("an407-fcaw-b", "test", "wav", "YES"),
    ]
    assert Lexicon.read(corpus.lexicon).words == ("GO", "YES")
    assert summary(corpus).problems == {"missing file": 1}


def test_some_speakers_of_cmus_training_set_are_held_out(cmus):
    for number in range(20):
        save(cmus / "wav" / "an4_clstk" / f"s{number:02}" / f"an1-s{number:02}-b.sph", noise(0.1))
    with (cmus / "etc" / "an4_train.transcription").open("a") as transcripts:
        transcripts.writelines(f"<s> GO </s> (an1-s{number:02}-b)\n" for number in range(20))
    corpus = an4(cmus)
    held_out = {utterance.speaker for utterance in corpus.split("valid")}
    assert len(held_out) == 3
    assert not held_out & {utterance.speaker for utterance in corpus.split("train")}


def test_a_line_that_is_not_a_transcript_is_refused(cmus):
    (cmus / "etc" / "an4_test.transcription").write_text("GO GO\n")
    with pytest.raises(DataError, match=r"an4_test\.transcription:1 is not a transcript"):
        an4(cmus)
