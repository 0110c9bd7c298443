"""The synthetic corpus: the same bits with any number of workers, and phone times that fit the sound."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from roundelay.errors import DataError
from roundelay.speech.audio import utterance_audio
from roundelay.speech.corpora.manifest import manifest
from roundelay.speech.features import log_mel
from roundelay.speech.hmm import Monophones, frame_labels
from roundelay.speech.synth.generate import synth
from roundelay.speech.synth.lexicon import phones, stressed
from roundelay.speech.synth.shard import SIZE, SynthConfig

pytest.importorskip("espeakng_loader", reason="synthetic speech needs the extra 'synth'")

HOURS = 0.06  # a little more than one shard
VOWELS = {phone for variants in stressed().values() for one in variants for phone in phones(one) if phone[0] in "AEIOU"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("synth")


@pytest.fixture(scope="module")
def corpus(folder):
    return synth(SynthConfig(hours=HOURS), folder / "two", workers=2)


def files(root):
    return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())


def test_one_worker_writes_the_same_bits_as_two(corpus, folder):
    assert len(corpus) > SIZE
    synth(SynthConfig(hours=HOURS), folder / "one", workers=1)
    names = files(folder / "one")
    assert names == files(folder / "two")
    same, different, _ = filecmp.cmpfiles(folder / "one", folder / "two", names, shallow=False)
    assert (len(same), different) == (len(names), [])


def test_a_shorter_corpus_is_the_beginning_of_a_longer_one(corpus, folder):
    short = synth(SynthConfig(hours=0.004), folder / "short", workers=1)
    assert 3 <= len(short) < 20
    for utterance in short.utterances:
        assert utterance.audio.read_bytes() == corpus[utterance.id].audio.read_bytes()
        assert utterance.phones == corpus[utterance.id].phones


def test_the_hours_are_right_and_there_are_no_problems(corpus):
    total_s = sum(utterance.duration_s for utterance in corpus.utterances)
    assert HOURS * 3600 <= total_s < HOURS * 3600 + 15
    assert corpus.problems.summary() == []
    assert {utterance.audio for utterance in corpus.utterances} == set(corpus.lexicon.parents[1].rglob("*.wav"))


def test_splits_share_no_voice(corpus):
    assert corpus.splits == ("train", "valid", "test")
    assert 0.7 < len(corpus.split("train")) / len(corpus) < 0.9
    speakers = [{utterance.speaker for utterance in corpus.split(name)} for name in corpus.splits]
    assert len(set.union(*speakers)) == sum(map(len, speakers))


def test_the_phones_of_each_word_are_a_pronunciation_of_it_and_fill_its_time(corpus):
    for utterance in corpus.utterances:
        assert utterance.text == " ".join(utterance.words.symbols)
        rows = list(utterance.phones)
        for word, start, length in utterance.words:
            inside = [row for row in rows if start - 1e-3 <= row[1] < start + length - 1e-3]
            assert tuple(row[0] for row in inside) in {phones(one) for one in stressed()[word]}
            assert sum(row[2] for row in inside) == pytest.approx(length, abs=2e-3)
        assert utterance.phones.end_s <= utterance.duration_s
        assert min(utterance.phones.durations_s) > 0.009
        assert max(utterance.phones.durations_s) < 0.5


def test_vowels_sound_where_the_times_say_and_silence_is_silent(corpus):
    phones = ("SIL", *corpus.phone_set)
    tying = Monophones(phones)
    level = {"SIL": [], "vowel": [], "closure": []}
    for utterance in corpus.utterances[::4]:
        samples = utterance_audio(utterance, 16000).samples
        samples = samples / np.sqrt(np.mean(samples**2))
        energy_T = np.log(np.array([np.mean(samples[t : t + 160] ** 2) for t in range(0, len(samples) - 160, 160)]))
        label_T = frame_labels(utterance.phones, len(energy_T), tying)
        phone_T, third_T = np.array(phones)[tying.phone_of_state[label_T]], tying.position_of_state[label_T]
        level["SIL"].append(energy_T[phone_T == "SIL"])
        level["vowel"].append(energy_T[np.isin(phone_T, list(VOWELS)) & (third_T == 1)])
        level["closure"].append(energy_T[np.isin(phone_T, ["K", "T", "P"]) & (third_T == 0)])
    median = {name: float(np.median(np.concatenate(values))) for name, values in level.items()}
    assert median["vowel"] > median["SIL"] + 6
    assert median["vowel"] > median["closure"] + 6
    loud = np.concatenate(level["vowel"])
    assert np.mean(loud > median["SIL"] + 4) > 0.98


def test_an_existing_corpus_is_not_made_again(corpus, folder, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    again = synth(SynthConfig(hours=HOURS), folder / "two")
    assert again.utterances == corpus.utterances


def test_it_is_an_ordinary_manifest_folder(corpus, folder):
    assert manifest(folder / "two").utterances == corpus.utterances


def test_noise_is_as_loud_as_asked_for(corpus, folder):
    noisy = synth(SynthConfig(hours=0.01, snr_dB=10), folder / "noisy", workers=1)
    ratios_dB = []
    for utterance in noisy.utterances:
        loud, quiet = (utterance_audio(version).samples for version in (utterance, corpus[utterance.id]))
        start, end = round(utterance.phones.starts_s[0] * 16000), round(utterance.phones.end_s * 16000)
        noise = (loud - quiet)[start:end]
        ratios_dB.append(10 * np.log10(np.mean(quiet[start:end] ** 2) / np.mean(noise**2)))
        assert utterance.phones == corpus[utterance.id].phones
    assert all(4 < ratio < 16 for ratio in ratios_dB)
    assert 7 < np.mean(ratios_dB) < 13


@pytest.fixture(scope="module")
def telephone(folder):
    return synth(SynthConfig(hours=0.004, seed=2, telephone=True), folder / "telephone", workers=1)


def test_another_seed_says_other_things(corpus, telephone):
    assert [utt.text for utt in telephone.utterances[:3]] != [utt.text for utt in corpus.utterances[:3]]


def test_a_telephone_has_its_rate_code_and_band(telephone):
    corpus = telephone
    info = soundfile.info(corpus.utterances[0].audio)
    assert (info.samplerate, info.subtype) == (8000, "ULAW")
    samples = np.concatenate([utterance_audio(utterance).samples for utterance in corpus.utterances])
    power = np.abs(np.fft.rfft(samples)) ** 2
    frequency_Hz = np.fft.rfftfreq(len(samples), 1 / 8000)
    outside = power[(frequency_Hz < 150) | (frequency_Hz > 3600)].sum()
    assert outside < 0.01 * power.sum()
    assert log_mel(samples, 8000).shape[1] == 40


def test_folders_with_other_files_are_refused(corpus, folder, tmp_path):
    with pytest.raises(DataError, match=r"holds another synthetic corpus \(see its synth\.json\)"):
        synth(SynthConfig(hours=1.0), folder / "two")
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="is not empty; choose another folder"):
        synth(SynthConfig(), tmp_path)
    with pytest.raises(DataError, match="more than 0 hours, got 0"):
        synth(SynthConfig(hours=0), tmp_path / "none")


def test_a_shard_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false" if os.path.exists("/bin/false") else "/usr/bin/false")
    with pytest.raises(DataError, match="shard 0 of the synthetic corpus failed: 1"):
        synth(SynthConfig(hours=0.01), tmp_path / "broken", workers=1)
