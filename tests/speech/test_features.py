"""Features against Kaldi's own code, and derivatives and moments against their definitions."""

from __future__ import annotations

import kaldi_native_fbank
import numpy as np
import pytest
from sounds import noise, save, tone

from roundelay.errors import DataError
from roundelay.speech.corpus import Utterance
from roundelay.speech.features import (
    FeatureConfig,
    delta,
    log_mel,
    mean_and_scale,
    speaker_features,
    with_deltas,
)


def kaldis(samples, rate_Hz, bins):
    """Kaldi's own code."""
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither = 0.0
    options.frame_opts.samp_freq = rate_Hz
    options.mel_opts.num_bins = bins
    computer = kaldi_native_fbank.OnlineFbank(options)
    computer.accept_waveform(rate_Hz, (samples * 32768).tolist())
    computer.input_finished()
    return np.array([computer.get_frame(t) for t in range(computer.num_frames_ready)])


@pytest.mark.parametrize("rate_Hz", [8000, 11025, 16000, 44100])
@pytest.mark.parametrize("bins", [40, 23])
def test_log_mel_equals_kaldis(rate_Hz, bins):
    samples = noise(1.0, rate_Hz) + tone(900, 1.0, rate_Hz)
    samples[: rate_Hz // 10] *= 1e-3
    ours, theirs = log_mel(samples, rate_Hz, bins), kaldis(samples, rate_Hz, bins)
    assert ours.shape == theirs.shape == (98, bins)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_a_long_recording_is_the_same_as_its_pieces():
    samples = noise(25.0, 8000)
    piece = log_mel(samples[120000:128000], 8000)
    np.testing.assert_allclose(log_mel(samples, 8000)[1500:1598], piece, atol=1e-5)


def test_digital_silence_is_the_floor_and_not_minus_infinity():
    frames = log_mel(np.zeros(16000, np.float32), 16000)
    np.testing.assert_allclose(frames, np.log(np.finfo(np.float32).eps), rtol=1e-5)


@pytest.mark.parametrize(("samples", "frames"), [(399, 0), (400, 1), (559, 1), (560, 2)])
def test_only_whole_windows_become_frames(samples, frames):
    assert log_mel(noise(1.0)[:samples], 16000).shape == (frames, 40)


def test_delta_is_the_regression_slope():
    frames = np.random.default_rng(1).standard_normal((30, 5)).astype(np.float32)
    padded = np.concatenate([frames[:1], frames[:1], frames, frames[-1:], frames[-1:]]).astype(np.float64)
    slopes = np.stack([np.polyfit(np.arange(-2, 3), padded[t : t + 5], 1)[0] for t in range(30)])
    np.testing.assert_allclose(delta(frames), slopes, atol=1e-6)
    three = with_deltas(frames)
    np.testing.assert_array_equal(three[:, :5], frames)
    np.testing.assert_allclose(three[:, 10:], delta(delta(frames)), atol=1e-7)


def test_moments_are_those_of_all_frames_together():
    rng = np.random.default_rng(2)
    parts = [(rng.standard_normal((n, 3)) * (1, 5, 0) + (9, -2, 4)).astype(np.float32) for n in (10, 200, 3)]
    mean, scale = mean_and_scale(iter(parts))
    together = np.concatenate(parts)
    np.testing.assert_allclose(mean, together.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(scale[:2], 1 / together.std(axis=0)[:2], rtol=1e-4)
    assert scale[2] == 0


@pytest.fixture
def utterances(tmp_path):
    return [
        Utterance(f"u{seed}", save(tmp_path / f"u{seed}.wav", noise(1.0 + seed / 5, seed=seed)), "s", "", "train")
        for seed in range(3)
    ]


def test_a_speaker_is_normalised_as_a_whole(utterances):
    found = speaker_features(utterances, FeatureConfig())
    together = np.concatenate(found.frames).astype(np.float64)
    assert found.ids == ["u0", "u1", "u2"]
    assert together.shape[1] == 120
    np.testing.assert_allclose(together.mean(axis=0), 0, atol=2e-3)
    np.testing.assert_allclose(together.std(axis=0), 1, atol=2e-3)
    assert found.audio_s == pytest.approx(3.6, abs=0.1)


def test_without_normalisation_and_deltas_it_is_log_mel(utterances):
    found = speaker_features(utterances[:1], FeatureConfig(deltas=False, cmvn=False))
    assert found.frames[0].dtype == np.float16
    np.testing.assert_allclose(found.frames[0], log_mel(noise(1.0), 16000), rtol=2e-3, atol=0.02)


def test_a_bad_file_is_named_and_left_out_and_the_others_are_as_without_it(utterances, tmp_path):
    (tmp_path / "empty.wav").write_bytes(b"")
    bad = [
        Utterance("gone", tmp_path / "gone.wav", "s", "", "train"),
        Utterance("empty", tmp_path / "empty.wav", "s", "", "train"),
        Utterance("short", save(tmp_path / "short.wav", noise(0.02)), "s", "", "train"),
    ]
    found = speaker_features([bad[0], *utterances, *bad[1:]], FeatureConfig())
    alone = speaker_features(utterances, FeatureConfig())
    assert found.ids == alone.ids
    for ours, theirs in zip(found.frames, alone.frames, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [kind for kind, _ in found.problems] == ["missing file", "empty file", "too short"]
    assert all(line.split(":")[0] in ("gone", "empty", "short") for _, line in found.problems)


def test_a_speaker_without_any_usable_file_has_no_features(tmp_path):
    found = speaker_features([Utterance("gone", tmp_path / "gone.wav", "s", "", "train")], FeatureConfig())
    assert (found.ids, found.frames, len(found.problems)) == ([], [], 1)


def test_a_flaw_is_named_and_the_file_used(tmp_path):
    path = save(tmp_path / "loud.wav", np.clip(tone(level=5.0), -1, 1))
    found = speaker_features([Utterance("loud", path, "s", "", "train")], FeatureConfig())
    assert found.ids == ["loud"]
    assert found.problems == [("clipped", "loud")]


def test_appended_features_stand_beside_the_normalised_ones(utterances):
    """As in the papers: 120 + 40 fMLLR, one for each frame, + 100 i-vector for the speaker = 260."""
    frames = len(log_mel(noise(1.0), 16000))
    fmllr = np.random.default_rng(0).standard_normal((frames + 1, 40)).astype(np.float32)
    ivector = np.arange(100, dtype=np.float32)
    found = speaker_features(utterances[:1], FeatureConfig(), appended=(lambda _: fmllr, lambda _: ivector))
    assert found.frames[0].shape == (frames, 260)
    np.testing.assert_allclose(found.frames[0][:, 120:160], fmllr[:frames], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(found.frames[0][:, 160:], np.tile(ivector, (frames, 1)))


def test_ivectors_of_every_tenth_frame_are_repeated(utterances):
    every_tenth = np.arange(10, dtype=np.float32)[:, None]
    found = speaker_features(utterances[:1], FeatureConfig(), appended=(lambda _: every_tenth,))
    assert found.frames[0][:, 120].tolist() == [t // 10 for t in range(98)]


def test_appended_features_of_another_length_are_refused(utterances):
    found = speaker_features(utterances[:1], FeatureConfig(), appended=(lambda _: np.zeros((70, 4), np.float32),))
    assert found.problems == [("no features", "u0: 70 frames of appended features do not fit 98 frames")]


def test_features_that_the_corpus_brings_replace_ours(utterances):
    brought = np.random.default_rng(0).standard_normal((50, 13)).astype(np.float32)

    def source(utterance):
        if utterance.id == "u1":
            raise DataError("not in feats.scp")
        return brought

    found = speaker_features(utterances, FeatureConfig(cmvn=False), frames=source)
    assert found.ids == ["u0", "u2"]
    assert found.problems == [("no features", "u1: not in feats.scp")]
    np.testing.assert_allclose(found.frames[0], with_deltas(brought), atol=2e-3)
