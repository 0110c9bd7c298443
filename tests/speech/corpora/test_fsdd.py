"""Spoken digits: from a clone of the repository, and from our archive."""

from __future__ import annotations

import os

import pytest
from sounds import noise, save

from roundelay.errors import DataError
from roundelay.speech.corpora.fsdd import fsdd
from roundelay.speech.features import FeatureConfig, speaker_features


def test_a_clone_is_read_by_the_names_of_its_recordings(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))
    clone = tmp_path / "free-spoken-digit-dataset"
    for name in ("0_george_0", "7_theo_12", "9_yweweler_3"):
        save(clone / "recordings" / f"{name}.wav", noise(0.4, 8000), 8000)
    save(clone / "recordings" / "other.wav", noise(0.4, 8000), 8000)
    corpus = fsdd(clone)
    assert [(utt.id, utt.speaker, utt.text, utt.split) for utt in corpus.utterances] == [
        ("0_george_0", "george", "zero", "train"),
        ("7_theo_12", "theo", "seven", "valid"),
        ("9_yweweler_3", "yweweler", "nine", "test"),
    ]
    entries = [line.split()[0] for line in corpus.lexicon.read_text().splitlines()]
    assert len(entries) == 11
    assert {"zero", "zero(2)", "nine"} < set(entries)
    assert not [path for path in clone.rglob("*") if path.suffix == ".tsv"]


def test_a_folder_with_neither_manifest_nor_recordings_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="neither a manifest nor recordings such as 7_jackson_32"):
        fsdd(tmp_path)


def test_the_archive_has_all_speakers_and_digits():
    if not os.environ.get("ROUNDELAY_DATA"):
        pytest.skip("FSDD is not here: ROUNDELAY_DATA is not set")
    try:
        corpus = fsdd()
    except DataError as error:
        pytest.skip(f"FSDD is not here: {error}")
    assert {name: len(corpus.split(name)) for name in corpus.splits} == {"train": 2000, "valid": 500, "test": 500}
    assert len({utterance.text for utterance in corpus.utterances}) == 10
    assert len(corpus.problems) == 0
    some = corpus.split("test")[::50]
    found = speaker_features(some, FeatureConfig(rate_Hz=8000))
    assert len(found.ids) == len(some)
