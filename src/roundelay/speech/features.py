"""Kaldi's log-mel features with their derivatives, normalised per speaker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import MissingExtraError
from roundelay.speech.audio import AudioError, Samples, utterance_audio
from roundelay.speech.cache import DataError
from roundelay.speech.corpus import FrameSource, Utterance

Frames: TypeAlias = NDArray[np.float32]

SHIFT_S = 0.01
DELTA_REACH = 2  # frames to each side in the regression; Kaldi's default
FRAMES_OFF = 3  # by which two feature files of one utterance may differ in length: edges are cut in several ways
VARIANCE_FLOOR = 1e-4  # of log energies; below it a dimension is constant and becomes zero


@dataclass(frozen=True)
class FeatureConfig:
    """What features depend on beside the audio.

    Attributes:
        rate_Hz: all audio is brought to it; the mel bank ends at half of it.
        bins: of the mel bank.
        deltas: append first and second derivatives.
        cmvn: mean 0 and variance 1 over each speaker, in every dimension but the appended ones.
    """

    rate_Hz: int = 16000
    bins: int = 40
    deltas: bool = True
    cmvn: bool = True


def log_mel(samples: Samples, rate_Hz: int, bins: int = 40) -> Frames:
    """T×bins log energies as Kaldi computes them without dither: 25 ms Povey windows every 10 ms, pre-emphasis 0.97.

    Samples in [-1, 1] are scaled to 16 bits, as Kaldi reads them. T = 1 + ⌊(N − 25 ms) / 10 ms⌋, or 0.
    """
    fbank = _native_fbank()
    options = fbank.FbankOptions()
    options.frame_opts.dither = 0.0
    options.frame_opts.samp_freq = rate_Hz
    options.mel_opts.num_bins = bins
    computer = fbank.OnlineFbank(options)
    computer.accept_waveform(rate_Hz, (samples * np.float32(32768)).tolist())  # a list: twice as fast as an array
    computer.input_finished()
    frames = [computer.get_frame(t) for t in range(computer.num_frames_ready)]
    return np.array(frames, dtype=np.float32).reshape(len(frames), bins)


def delta(frames_TF: Frames) -> Frames:
    """d_t = Σ_n n (c_{t+n} − c_{t−n}) / (2 Σ_n n²), n = 1, 2: the slope of a line through five frames; ends repeated.

    >>> delta(np.arange(7, dtype=np.float32)[:, None])[2:5, 0].tolist()
    [1.0, 1.0, 1.0]
    """
    reach, count = DELTA_REACH, len(frames_TF)
    padded = np.pad(frames_TF, ((reach, reach), (0, 0)), mode="edge")
    slope = np.zeros_like(frames_TF)
    for n in range(1, reach + 1):
        slope += np.float32(n) * (padded[reach + n : reach + n + count] - padded[reach - n : reach - n + count])
    return slope / np.float32(2 * sum(n * n for n in range(1, reach + 1)))


def with_deltas(frames_TF: Frames) -> Frames:
    """Frames, their derivatives and the derivatives of those, side by side."""
    first = delta(frames_TF)
    return np.concatenate([frames_TF, first, delta(first)], axis=1)


def mean_and_scale(utterances: Iterable[Frames]) -> tuple[Frames, Frames]:
    """μ and 1/σ over all frames of several utterances, dimension by dimension; 0 for 1/σ where nothing varies."""
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    for frames_TF in utterances:
        count += len(frames_TF)
        total = total + frames_TF.sum(axis=0, dtype=np.float64)
        squares = squares + np.square(frames_TF, dtype=np.float64).sum(axis=0)
    mean = total / count
    variance = squares / count - np.square(mean)
    scale = np.where(variance > VARIANCE_FLOOR, 1 / np.sqrt(np.maximum(variance, VARIANCE_FLOOR)), 0.0)
    return mean.astype(np.float32), scale.astype(np.float32)


@dataclass
class SpeakerFeatures:
    """T×F features of one speaker's utterances, in half precision, and what was wrong with some of them."""

    ids: list[str] = field(default_factory=list)
    frames: list[NDArray[np.float16]] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    audio_s: float = 0.0


def speaker_features(
    utterances: Sequence[Utterance],
    config: FeatureConfig,
    frames: FrameSource | None = None,
    appended: Sequence[FrameSource] = (),
) -> SpeakerFeatures:
    """The features of utterances that are normalised together; those that cannot be used are left out and named."""
    result = SpeakerFeatures()
    bases: list[Frames] = []
    extras: list[list[Frames]] = []
    for utterance in utterances:
        try:
            base_TF = frames(utterance) if frames else _own_frames(utterance, config, result)
            beside = [_fitted(source(utterance), len(base_TF)) for source in appended]
        except AudioError as error:
            result.problems.append((error.kind, f"{utterance.id}: {error.detail}"))
        except DataError as error:
            result.problems.append(("no features", f"{utterance.id}: {error}"))
        else:
            result.ids.append(utterance.id)
            result.audio_s += len(base_TF) * SHIFT_S
            bases.append(base_TF)
            extras.append(beside)
    expanded = with_deltas if config.deltas else np.asarray
    mean, scale = mean_and_scale(map(expanded, bases)) if config.cmvn and bases else (np.float32(0), np.float32(1))
    for base_TF, beside in zip(bases, extras, strict=True):
        length = min(map(len, (base_TF, *beside)))
        columns = ((expanded(base_TF) - mean) * scale, *beside)
        result.frames.append(np.concatenate([array[:length] for array in columns], axis=1).astype(np.float16))
    return result


def _own_frames(utterance: Utterance, config: FeatureConfig, result: SpeakerFeatures) -> Frames:
    audio = utterance_audio(utterance, config.rate_Hz)
    result.problems.extend((flaw, utterance.id) for flaw in audio.flaws)
    frames_TF = log_mel(audio.samples, config.rate_Hz, config.bins)
    if not len(frames_TF):
        raise AudioError("too short", f"{audio.duration_s:.3f} s is less than one window")
    return frames_TF


def _fitted(values: Frames, frames: int) -> Frames:
    """One vector for the utterance, one for every few frames (Kaldi's online i-vectors), or one for each: T×F."""
    if values.ndim == 1:
        return np.broadcast_to(values, (frames, len(values)))
    period = round(frames / len(values))
    repeated = np.repeat(values, period, axis=0) if period > 1 else values
    if abs(len(repeated) - frames) > max(FRAMES_OFF, period):
        raise DataError(f"{len(values)} frames of appended features do not fit {frames} frames")
    return repeated


def _native_fbank() -> Any:  # noqa: ANN401  # a module
    try:
        import kaldi_native_fbank
    except ImportError as error:
        raise MissingExtraError("computing features", "speech") from error
    return kaldi_native_fbank
