"""Kaldi data directories, written with Kaldi's own formats through kaldiio."""

from __future__ import annotations

import kaldiio
import numpy as np
import pytest
from sounds import noise, save

from roundelay.errors import DataError
from roundelay.speech.audio import utterance_audio
from roundelay.speech.config import SpeechConfig
from roundelay.speech.corpora.kaldi import kaldi
from roundelay.speech.describe import summary
from roundelay.speech.feature_set import features, features_key
from roundelay.speech.features import FeatureConfig, log_mel
from roundelay.speech.prepare import corpus_of


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))


def write(folder, **tables):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tables.items():
        (folder / name.replace("_scp", ".scp")).write_text(text)
    return folder


@pytest.fixture
def stereo(tmp_path):
    left, right = noise(3.0, 8000, seed=1), noise(3.0, 8000, seed=2)
    save(tmp_path / "audio" / "call.sph", np.stack([left, right], axis=1), 8000, "ULAW")
    return left, right


@pytest.fixture
def data(tmp_path, stereo):
    return write(
        tmp_path / "data" / "train",
        wav_scp=f"call-A {tmp_path}/audio/call.sph\n"
        f"call-B /opt/kaldi/tools/sph2pipe_v2.5/sph2pipe -f wav -p -c 2 {tmp_path}/audio/call.sph |\n",
        reco2file_and_channel="call-A call A\ncall-B call B\n",
        segments="a1 call-A 0.5 1.5\nb1 call-B 1.0 2.0\nb2 call-B 2.0 -1\n",
        text="a1 HELLO THERE\nb1 HI\nb2 BYE BYE\n",
        utt2spk="a1 ann\nb1 bob\nb2 bob\n",
    )


def test_segments_of_both_sides_of_a_call_are_found(data, stereo):
    corpus = kaldi(data)
    assert [(utt.id, utt.speaker, utt.text, utt.split) for utt in corpus.utterances] == [
        ("a1", "ann", "HELLO THERE", "train"),
        ("b1", "bob", "HI", "train"),
        ("b2", "bob", "BYE BYE", "train"),
    ]
    left, right = stereo
    for id, expected in (("a1", left[4000:12000]), ("b1", right[8000:16000]), ("b2", right[16000:])):
        np.testing.assert_allclose(utterance_audio(corpus[id]).samples, expected, atol=0.02)
    assert len(corpus.problems) == 0


def test_several_directories_are_the_splits(data):
    other = write(data.parent / "dev", text="d1 YES\n", wav_scp=(data / "wav.scp").read_text().replace("call-A", "d1"))
    write(data.parent / "lang", **{"words.txt": "YES 1\n"})
    corpus = kaldi(data.parent)
    assert corpus.splits == ("train", "valid")
    assert corpus.split("valid")[0].speaker == "d1"
    assert other.is_dir()


def test_a_pipe_is_refused_unless_allowed(tmp_path):
    path = save(tmp_path / "a.wav", noise())
    mark = tmp_path / "ran"
    folder = write(
        tmp_path / "test",
        wav_scp=f"u1 touch {mark}; cat {path} |\nu2 {path}\nu3 sph2pipe -f wav x.sph | touch {mark} |\n",
        text="u1 A\nu2 B\nu3 C\n",
    )
    corpus = kaldi(folder)
    assert [utterance.id for utterance in corpus.utterances] == ["u2"]
    assert corpus.problems.counts() == {"pipe refused": 2, "no recording": 2}
    assert not mark.exists()
    allowed = kaldi(folder, allow_pipes=True)
    assert mark.exists()
    config = SpeechConfig(corpus="kaldi", data=str(folder), allow_pipes=True)
    assert [utterance.id for utterance in corpus_of(config).utterances] == ["u1", "u2", "u3"]
    np.testing.assert_allclose(utterance_audio(allowed["u1"]).samples, noise(), atol=1e-4)


def test_paths_relative_to_the_folder_of_the_recipe_are_found(tmp_path):
    save(tmp_path / "s5" / "corpus" / "a.wav", noise())
    folder = write(tmp_path / "s5" / "data" / "test", wav_scp="u1 corpus/a.wav\n", text="u1 A\n")
    assert kaldi(folder).utterances[0].audio == tmp_path / "s5" / "corpus" / "a.wav"


def test_missing_files_are_counted(tmp_path):
    path = save(tmp_path / "a.wav", noise())
    folder = write(tmp_path / "test", wav_scp=f"u1 {path}\nu2 gone.wav\n", text="u1\nu2 B\nu3 C\n")
    corpus = kaldi(folder)
    assert corpus.problems.counts() == {"no text": 1, "no recording": 1}
    assert summary(corpus).problems == {"no text": 1, "no recording": 1, "missing file": 1}


def test_a_folder_that_is_not_a_data_directory_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a Kaldi data directory"):
        kaldi(tmp_path)
    write(tmp_path / "test", text="u1 A\n", segments="u1 rec soon later\n")
    with pytest.raises(DataError, match="'u1 rec soon later' does not have the form: utterance recording start end"):
        kaldi(tmp_path)


def arks(folder, name, arrays):
    kaldiio.save_ark(str(folder / f"{name}.ark"), arrays, scp=str(folder / f"{name}.scp"))


def test_fmllr_and_ivectors_make_the_260_dimensions_of_the_papers(data):
    random = np.random.default_rng(0)
    audio = {utt.id: utterance_audio(utt).samples for utt in kaldi(data).utterances}
    lengths = {id: len(log_mel(samples, 8000)) for id, samples in audio.items()}
    fmllr = {id: random.standard_normal((length, 40)).astype(np.float32) for id, length in lengths.items()}
    ivectors = {speaker: random.standard_normal(100).astype(np.float32) for speaker in ("ann", "bob")}
    arks(data, "fmllr", fmllr)
    arks(data, "ivectors", ivectors)
    corpus = kaldi(data)
    made = features(corpus, FeatureConfig(rate_Hz=8000), workers=2)
    assert made.dimension == 260
    assert made.problems.summary() == []
    np.testing.assert_allclose(made["b1"][:, 120:160], fmllr["b1"], atol=2e-3)
    np.testing.assert_allclose(made["b2"][5, 160:], ivectors["bob"], atol=2e-3)
    key = features_key(corpus, FeatureConfig())
    arks(data, "ivectors", {**ivectors, "eve": ivectors["bob"]})
    assert features_key(kaldi(data), FeatureConfig()) != key


def test_kaldis_own_features_need_no_audio(tmp_path):
    random = np.random.default_rng(0)
    frames = {f"u{n}": (random.standard_normal((50 + n, 13)) + 7).astype(np.float32) for n in range(3)}
    folder = write(tmp_path / "train", text="u0 A\nu1 B\nu2 C\nu3 D\n", utt2spk="u0 s\nu1 s\nu2 s\nu3 s\n")
    arks(folder, "feats", frames)
    total = np.concatenate(list(frames.values())).astype(np.float64)
    stats = np.stack([[*total.sum(axis=0), len(total)], [*(total**2).sum(axis=0), 0]])
    arks(folder, "cmvn", {"s": stats})
    made = features(kaldi(folder), FeatureConfig(deltas=False, cmvn=False), workers=1)
    np.testing.assert_allclose(made["u1"], frames["u1"] - total.mean(axis=0), atol=5e-3)
    assert made.problems.counts() == {"no features": 1}


def test_features_of_several_directories_are_found_by_utterance(tmp_path):
    for name, id, size in (("train", "u0", 13), ("test", "u1", 13), ("odd", "u2", 14)):
        folder = write(tmp_path / "data" / name, text=f"{id} A\n")
        arks(folder, "feats", {id: np.full((30, size), len(name), np.float32)})
    write(tmp_path / "data" / "none", text="u3 A\n", feats_scp="")
    config = FeatureConfig(deltas=False, cmvn=False)
    corpus = kaldi(tmp_path / "data")
    same = corpus.replace(utterances=tuple(utt for utt in corpus.utterances if utt.id != "u2"))
    made = features(same, config, workers=1)
    assert made["u0"][0, 0] == 5
    assert made["u1"][0, 0] == 4
    assert made.problems.cases == [("no features", "u3: neither 'u3' nor its speaker is in feats.scp")]
    with pytest.raises(DataError, match="features of 'u1' have 13 dimensions, others 14"):
        features(corpus, config, workers=1)


def test_an_utterance_of_two_directories_is_taken_from_the_first(tmp_path):
    path = save(tmp_path / "a.wav", noise())
    for name, text in (("a", "FIRST"), ("b", "SECOND")):
        write(tmp_path / "data" / name, text=f"u0 {text}\n", wav_scp=f"u0 {path}\n")
    corpus = kaldi(tmp_path / "data")
    assert [utterance.text for utterance in corpus.utterances] == ["FIRST"]
    assert corpus.problems.counts() == {"duplicate utterance": 1}


def test_state_numbers_are_read_one_utterance_at_a_time(data):
    pdfs = {"a1": np.array([5, 5, 7], np.int32), "b1": np.array([1, 2], np.int32)}
    arks(data, "pdf", pdfs)
    corpus = kaldi(data)
    assert set(corpus.pdfs) == {"a1", "b1"}
    assert corpus.pdfs["a1"].tolist() == [5, 5, 7]
    assert corpus.pdfs["a1"].dtype == np.int32


def test_a_command_instead_of_an_archive_is_not_run(tmp_path):
    mark = tmp_path / "ran"
    folder = write(tmp_path / "train", text="u0 A\n", feats_scp=f"u0 touch {mark} |\n")
    with pytest.raises(DataError, match=r"has a command for 'u0'"):
        features(kaldi(folder), workers=1)
    assert not mark.exists()


def test_a_missing_archive_is_named(tmp_path):
    folder = write(tmp_path / "train", text="u0 A\n", feats_scp="u0 gone.ark:12\n")
    with pytest.raises(DataError, match=r"cannot read 'u0' of feats\.scp"):
        features(kaldi(folder), workers=1)


def test_a_truncated_archive_loses_only_its_utterances(tmp_path):
    folder = write(tmp_path / "train", text="u1 A\nu2 B\nu3 C\n")
    rows = np.ones((20, 13), np.float32)
    arks(folder, "feats", {"u1": rows, "u2": np.full_like(rows, np.nan), "u3": rows})
    whole = (folder / "feats.ark").read_bytes()
    (folder / "feats.ark").write_bytes(whole[:-100])
    corpus = kaldi(folder)
    found = features(corpus, FeatureConfig(), workers=1)
    assert list(found) == ["u1"]
    assert [kind for kind, _ in found.problems.cases] == ["no features"] * 2
    assert summary(corpus).problems == {"no features": 2}


def test_truncated_state_numbers_are_refused(tmp_path):
    folder = write(tmp_path / "train", text="u1 A\n")
    arks(folder, "feats", {"u1": np.ones((20, 13), np.float32)})
    arks(folder, "pdf", {"u1": np.arange(20, dtype=np.int32)})
    (folder / "pdf.ark").write_bytes((folder / "pdf.ark").read_bytes()[:-7])
    with pytest.raises(DataError, match=r"cannot read 'u1' of pdf\.scp"):
        kaldi(folder).pdfs["u1"]
