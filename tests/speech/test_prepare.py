"""From a corpus to labels of frames: what is computed, what is cached, and what is refused."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pytest

pytest.importorskip("kaldi_decoder")

from tones import WORDS, write_tones

from roundelay.errors import ConfigError, DataError
from roundelay.speech import prepare
from roundelay.speech.augment import AugmentConfig
from roundelay.speech.config import LmConfig, SpeechConfig, check, check_data
from roundelay.speech.hmm import phones_in
from roundelay.speech.prepare import UNLABELLED, language_model, lexicon_of, prepared

pytestmark = pytest.mark.usefixtures("tones_cache")


@pytest.fixture
def config(tones_folder):
    return SpeechConfig(corpus="manifest", data=str(tones_folder))


def test_labels_are_those_of_the_phone_times(config):
    ready = prepared(config)
    assert ready.tying.phones == ("SIL", "A", "B", "C")
    utterance = ready.corpus.split("train")[0]
    first, last = ready.features.rows(utterance.id)
    found = phones_in(ready.labels_N[first:last], ready.tying)
    assert [ready.tying.phones[i] for i in found.phones] == list(utterance.phones.symbols)


def test_every_split_has_spans_and_other_splits_have_none(config):
    ready = prepared(config)
    assert [len(ready.spans(split)) for split in ("train", "valid", "test", "dance")] == [24, 6, 6, 0]


def test_priors_and_transitions_come_from_the_training_split(config):
    ready = prepared(config)
    train = np.concatenate([ready.labels_N[first:last] for first, last in ready.spans("train")])
    smoothed = np.bincount(train, minlength=12) + 1
    np.testing.assert_allclose(np.exp(ready.log_priors), smoothed / smoothed.sum(), rtol=1e-5)
    assert ((ready.self_loops > 0) & (ready.self_loops < 1)).all()


def test_a_flat_start_finds_the_true_times_two_frames_early(config):
    told, found = prepared(config), prepared(replace(config, labels="flat-start"))
    assert (found.labels_N != UNLABELLED).all()
    phones = [ready.tying.phone_of_state[ready.labels_N] for ready in (told, found)]
    spans = [span for split in ("train", "valid", "test") for span in told.spans(split)]

    def agreement(frames_early):
        moved = [(phones[0][i + frames_early : j], phones[1][i : j - frames_early]) for i, j in spans]
        return np.mean(np.concatenate([one == other for one, other in moved]))

    # A frame covers 25 ms, and its derivatives reach further ahead. A transcript does not determine on which side of a boundary
    # such frames belong, so all boundaries come two frames early: agreement is 0.85 as they are and 0.95 when moved.
    assert agreement(0) > 0.75
    assert agreement(2) > 0.93
    assert agreement(2) == max(agreement(early) for early in range(6))


def test_tied_triphones_refine_monophones(config):
    monophones, tied = prepared(config), prepared(replace(config, states=20))
    assert 12 < tied.tying.num_states <= 20
    phone = [ready.tying.phone_of_state[ready.labels_N] for ready in (monophones, tied)]
    assert np.array_equal(*phone)


def test_times_of_a_folder_replace_those_of_the_corpus(config, tmp_path):
    (tmp_path / "phones.ctm").write_text("train000 1 0.0 0.2 A\n")
    ready = prepared(replace(config, labels=str(tmp_path)))
    first, _ = ready.features.rows("train000")
    assert ready.tying.phones[ready.tying.phone_of_state[ready.labels_N[first]]] == "A"
    assert len(ready.spans("train")) == 1, "utterances without times there have none"
    assert ready.problems.counts() == {"no labels": 23}


def test_copies_at_other_speeds_have_the_times_of_the_folder(config, tmp_path):
    (tmp_path / "phones.ctm").write_text("train000 1 0.0 0.2 A\n")
    faster = replace(config, labels=str(tmp_path), augment=AugmentConfig(speeds=(0.5,)))
    ready = prepared(faster)
    assert len(ready.spans("train")) == 2
    assert ready.corpus["sp0.5-train000"].phones.end_s == pytest.approx(0.4)


def test_other_speeds_of_features_that_kaldi_made_are_refused(config, monkeypatch):
    with_frames = prepare.corpus_of(config).replace(frames=lambda utterance: None)
    monkeypatch.setattr(prepare, "corpus", lambda *_, **__: with_frames)
    with pytest.raises(ConfigError, match=r"settings\.augment\.speeds needs our own features and labels"):
        prepare.corpus_of(replace(config, augment=AugmentConfig(speeds=(0.9,))))
    with pytest.raises(ConfigError, match=r"settings\.augment\.bins hides bins of our own mel filters"):
        prepared(replace(config, augment=AugmentConfig(bins=4)))


def test_without_a_lexicon_the_words_of_the_training_split_are_all_there_are(config):
    speech = prepare.corpus_of(config).replace(lexicon=None)
    said = {word for utterance in speech.split("train") for word in utterance.text.split()}
    assert set(lexicon_of(speech).words) == said


def test_the_second_time_comes_from_the_cache(config, monkeypatch):
    prepared(config)
    monkeypatch.setattr(prepare, "_write", lambda *_: pytest.fail("computed again"))
    prepared(config)
    with pytest.raises(pytest.fail.Exception):
        prepared(replace(config, states=15))


def test_processes_that_start_together_get_the_same(config, tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        first, second = pool.map(prepared, [config, config])
    assert np.array_equal(first.labels_N, second.labels_N)
    assert len(list((tmp_path / "labels").glob("*/states.json"))) == 1


def test_copies_at_other_speeds_are_trained_on_with_their_own_times(config):
    fast = prepared(replace(config, augment=AugmentConfig(speeds=(2.0,))))
    assert len(fast.spans("train")) == 48
    assert len(fast.spans("valid")) == 6
    rows = fast.features.rows("sp2-train000")
    assert 2 * (rows[1] - rows[0]) == pytest.approx(len(fast.features["train000"]), abs=3)


def test_without_a_lexicon_words_are_letters(tmp_path):
    from roundelay.speech.corpora.manifest import manifest

    (write_tones(tmp_path, counts={"train": 2}) / "lexicon" / "tones.dic").unlink()
    assert lexicon_of(manifest(tmp_path))[next(iter(lexicon_of(manifest(tmp_path)).words))] != ()
    assert lexicon_of(manifest(tmp_path)).phones[1:] == tuple(sorted({*"".join(lexicon_of(manifest(tmp_path)).words)}))


def test_the_language_model_counts_training_transcripts_once_whatever_their_speed(config):
    once, twice = prepared(config), prepared(replace(config, augment=AugmentConfig(speeds=(2.0,))))
    models = [language_model(LmConfig(), ready.corpus, ready.lexicon) for ready in (once, twice)]
    assert models[0] == models[1]
    assert models[0].vocabulary == tuple(sorted(WORDS))


def test_a_corpus_without_times_says_what_to_do(tmp_path):
    config = SpeechConfig(corpus="manifest", data=str(write_tones(tmp_path, alignments=False, counts={"train": 2})))
    with pytest.raises(DataError, match="flat-start"):
        prepared(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"corpus": "an5"}, "did you mean 'an4'"),
        ({"corpus": "manifest", "data": ""}, "needs its folder"),
        ({"data": "/nowhere"}, "there is no '/nowhere'"),
        ({"corpus": "an4", "data": ""}, "an4 is not found"),
        ({"labels": "flat"}, "phones.ctm, got 'flat'"),
        ({"augment": AugmentConfig(speeds=(0.0,))}, "above 0"),
        ({"lm": LmConfig(arpa="nowhere.arpa")}, "no file 'nowhere.arpa'"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(config, changes, said, monkeypatch):
    monkeypatch.delenv("ROUNDELAY_DATA", raising=False)
    with pytest.raises(ConfigError, match=said):
        check_all(replace(config, **changes))


def check_all(config):
    check(config)
    check_data(config)
