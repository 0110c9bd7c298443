"""Every file gives one channel at one rate, or an error of one line."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from sounds import cut_off, noise, save, tone

from roundelay.speech.audio import Audio, AudioError, read_audio, resampled, steady, utterance_audio
from roundelay.speech.corpus import Utterance


def frequency_Hz(samples, rate_Hz):
    """Where the spectrum is highest."""
    return np.argmax(np.abs(np.fft.rfft(samples * np.hanning(len(samples))))) * rate_Hz / len(samples)


@pytest.mark.parametrize("rate_Hz", [8000, 16000, 22050, 44100, 48000])
def test_a_tone_keeps_its_frequency_length_and_level_at_any_rate(tmp_path, rate_Hz):
    path = save(tmp_path / "tone.wav", tone(1000, 1.0, rate_Hz), rate_Hz)
    audio = utterance_audio(Utterance("u", path, "s", "", "test"), 16000)
    assert audio.rate_Hz == 16000
    assert len(audio.samples) == 16000
    assert audio.samples.dtype == np.float32
    assert abs(frequency_Hz(audio.samples, 16000) - 1000) < 2
    assert abs(np.abs(audio.samples[2000:-2000]).max() - 0.3) < 0.005
    assert audio.flaws == ()


def test_resampling_removes_what_the_lower_rate_cannot_carry():
    kept, gone = (resampled(tone(frequency, 1.0, 44100), 44100, 16000) for frequency in (3000, 12000))
    assert np.abs(kept[500:-500]).max() > 0.29
    assert np.abs(gone[500:-500]).max() < 0.002


@pytest.mark.parametrize(
    ("name", "subtype", "error"),
    [
        ("a.wav", "PCM_16", 2e-4),
        ("a.wav", "PCM_24", 1e-6),
        ("a.wav", "FLOAT", 1e-7),
        ("a.wav", "ULAW", 0.02),
        ("a.flac", "PCM_16", 2e-4),
        ("a.sph", "PCM_16", 2e-4),
        ("a.sph", "ULAW", 0.02),
    ],
)
def test_every_format_gives_the_same_sound(tmp_path, name, subtype, error):
    samples = noise()
    audio = read_audio(save(tmp_path / name, samples, subtype=subtype))
    assert np.abs(audio.samples - samples).max() < error
    assert audio.flaws == ()


def test_a_channel_is_taken_out_of_a_stereo_file_and_without_one_they_are_mixed(tmp_path):
    left, right = tone(300), tone(700)
    path = save(tmp_path / "stereo.wav", np.stack([left, right], axis=1), subtype="FLOAT")
    np.testing.assert_array_equal(read_audio(path, channel=1).samples, right)
    mixed = read_audio(path)
    np.testing.assert_allclose(mixed.samples, (left + right) / 2, atol=1e-7)
    assert mixed.flaws == ("mixed to mono",)
    for channel in (2, -1):
        with pytest.raises(AudioError, match=rf"has 2 channels, asked for channel {channel} \(counted from 0\)"):
            read_audio(path, channel=channel)


@pytest.mark.parametrize(("start_s", "duration_s"), [(float("nan"), 1.0), (0.0, float("inf")), (-1.0, None)])
def test_impossible_times_are_refused(tmp_path, start_s, duration_s):
    with pytest.raises(AudioError, match="bad times"):
        read_audio(save(tmp_path / "a.wav", noise(1.0)), start_s=start_s, duration_s=duration_s)


def test_a_segment_is_cut_to_the_sample(tmp_path):
    samples = noise(2.0, 8000)
    path = save(tmp_path / "long.wav", samples, 8000, "FLOAT")
    piece = read_audio(path, start_s=0.5, duration_s=0.25)
    np.testing.assert_array_equal(piece.samples, samples[4000:6000])
    assert piece.flaws == ()


def test_a_length_rounded_to_milliseconds_does_not_cut_the_end(tmp_path):
    path = save(tmp_path / "a.wav", noise(1.0)[:-5])
    assert len(read_audio(path, duration_s=0.999).samples) == 15995


@pytest.mark.parametrize(("name", "subtype"), [("a.wav", "PCM_16"), ("a.sph", "ULAW"), ("a.sph", "PCM_16")])
def test_the_beginning_of_a_truncated_file_is_used(tmp_path, name, subtype):
    samples = noise(2.0)
    audio = read_audio(cut_off(save(tmp_path / name, samples, subtype=subtype)))
    assert audio.flaws == ("truncated",)
    assert 14000 < len(audio.samples) < 17000
    assert np.abs(audio.samples - samples[: len(audio.samples)]).max() < 0.02


def test_the_whole_blocks_of_a_truncated_flac_are_used(tmp_path):
    samples = noise(4.0)
    audio = read_audio(cut_off(save(tmp_path / "a.flac", samples)))
    assert "truncated" in audio.flaws
    assert len(audio.samples) > 16000
    assert np.abs(audio.samples - samples[: len(audio.samples)]).max() < 2e-4


def test_a_segment_beyond_the_end_is_truncated_or_has_no_samples(tmp_path):
    path = save(tmp_path / "a.wav", noise(1.0))
    assert read_audio(path, start_s=0.5, duration_s=1.0).flaws == ("truncated",)
    with pytest.raises(AudioError, match="no samples"):
        read_audio(path, start_s=2.0, duration_s=1.0)


def test_clipped_and_silent_files_are_used_and_named(tmp_path):
    loud = save(tmp_path / "loud.wav", np.clip(tone(level=3.0), -1, 1))
    assert read_audio(loud).flaws == ("clipped",)
    assert read_audio(save(tmp_path / "full.wav", tone(level=0.99))).flaws == ()
    telephone = save(tmp_path / "loud.sph", np.clip(tone(level=3.0), -1, 1), subtype="ULAW")
    assert read_audio(telephone).flaws == ("clipped",)
    assert read_audio(save(tmp_path / "full.sph", tone(level=0.9), subtype="ULAW")).flaws == ()
    one_side = np.stack([np.clip(tone(level=3.0), -1, 1), tone(level=0.1)], axis=1)
    assert read_audio(save(tmp_path / "sides.wav", one_side)).flaws == ("mixed to mono", "clipped")
    assert read_audio(save(tmp_path / "none.wav", np.zeros(8000, np.float32))).flaws == ("silent",)


def test_noise_and_a_hum_are_steady_but_sound_that_varies_by_10_dB_is_not():
    rate_Hz = 16000
    white = np.random.default_rng(0).standard_normal(rate_Hz).astype(np.float32)
    loudness = np.where(np.arange(rate_Hz) % 4000 < 2000, 1.0, 10**-0.5).astype(np.float32)  # 0 and −10 dB in turn
    assert steady(Audio(0.1 * white, rate_Hz))
    assert steady(Audio(tone(level=0.1), rate_Hz))
    assert not steady(Audio(0.1 * white * loudness, rate_Hz))
    assert not steady(Audio(white[:4000], rate_Hz)), "a quarter of a second says nothing"
    assert not steady(Audio(np.zeros(rate_Hz, np.float32), rate_Hz)), "silence has a name of its own"


def test_the_error_for_an_unusable_file_says_why_in_one_line(tmp_path):
    empty, text, nan, headless = (tmp_path / name for name in ("empty.wav", "text.wav", "nan.wav", "head.wav"))
    empty.write_bytes(b"")
    text.write_text("this is no audio\n" * 100)
    save(nan, np.array([0.0, np.nan, 0.1] * 1000, np.float32), subtype="FLOAT")
    save(headless, np.zeros(0, np.float32))
    shorten = tmp_path / "short.sph"
    shorten.write_bytes(
        b"NIST_1A\n   1024\nsample_coding -s26 ulaw,embedded-shorten-v2.00\nend_head\n".ljust(1024) + b"ajkg"
    )
    headerless = tmp_path / "samples.raw"
    headerless.write_bytes(bytes(1000))
    for path, kind in [
        (headerless, "unreadable file"),
        (tmp_path / "gone.wav", "missing file"),
        (tmp_path, "missing file"),
        (empty, "empty file"),
        (text, "unreadable file"),
        (nan, "not finite"),
        (headless, "no samples"),
        (shorten, "unreadable file"),
    ]:
        with pytest.raises(AudioError) as caught:
            read_audio(path)
        assert caught.value.kind == kind
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(AudioError, match="sph2pipe"):
        read_audio(shorten)


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(AudioError("empty file", "a.wav")))
    assert (error.kind, error.detail, str(error)) == ("empty file", "a.wav", "empty file: a.wav")


def test_speed_shortens_and_raises_the_pitch(tmp_path):
    path = save(tmp_path / "tone.wav", tone(1000, 1.0))
    fast = utterance_audio(Utterance("u", path, "s", "", "train").faster(1.1), 16000)
    assert abs(fast.duration_s - 1 / 1.1) < 1e-3
    assert abs(frequency_Hz(fast.samples, 16000) - 1100) < 3


def test_an_utterance_without_audio_says_so():
    with pytest.raises(AudioError, match="no audio: u has no audio file"):
        utterance_audio(Utterance("u", None, "s", "", "test"))
