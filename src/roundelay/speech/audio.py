"""Reading audio: one channel at one sample rate, from any file that libsndfile reads, and a list of its flaws."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import DataError
from roundelay.speech.corpus import Utterance
from roundelay.speech.libraries import library

Samples: TypeAlias = NDArray[np.float32]

CLIPPED_SHARE = 1e-3  # a recording is clipped if more than this share of its samples is at full scale
FULL_SCALE = 0.999
LOUDEST_G711 = 0.98  # full scale of µ-law is 32124 of 32768, of A-law 32256
FADE = 0.04  # width of the slope of the low-pass filter in `resampled`, relative to the Nyquist frequency
STEADY_dB = 6.0  # speech varies more: at least 28 dB in every utterance of AN4; white noise varies by 1 dB
STEADY_BLOCK_MS, STEADY_BLOCKS = 25, 20  # loudness is measured in blocks; fewer blocks say nothing
GUARD_MS = 20  # zeros that `resampled` appends
SHORTER_S = 0.05  # a segment may be this much shorter than asked for, because segment times are rounded


class AudioError(DataError):
    """Audio that cannot be used. Problems are counted by `kind`; `detail` names the file and the reason."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:  # pickle would call AudioError(message)
        return AudioError, (self.kind, self.detail)


@dataclass(frozen=True)
class Audio:
    """Samples in [-1, 1] of one channel, and the names of their flaws: truncated, mixed to mono, clipped, silent."""

    samples: Samples
    rate_Hz: int
    flaws: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.rate_Hz


def utterance_audio(utterance: Utterance, rate_Hz: int | None = None) -> Audio:
    """The audio of an utterance, resampled to `rate_Hz` (default: the rate of the file). Raises AudioError if it is unusable."""
    if utterance.audio is None:
        raise AudioError("no audio", f"{utterance.id} has no audio file")
    audio = read_audio(utterance.audio, utterance.channel, utterance.start_s, utterance.duration_s)
    target_Hz = rate_Hz or audio.rate_Hz
    samples = resampled(audio.samples, round(audio.rate_Hz * utterance.speed), target_Hz)
    return Audio(samples, target_Hz, audio.flaws)


def read_audio(path: Path, channel: int | None = None, start_s: float = 0.0, duration_s: float | None = None) -> Audio:
    """A piece of a file at its own rate. Formats: WAV, FLAC, sphere and all others that libsndfile reads.

    `channel` counts from 0; None averages all channels. Raises AudioError if the piece is unusable.
    """
    if not (0 <= start_s < math.inf and 0 <= (duration_s or 0) < math.inf):
        raise AudioError(
            "bad times", f"{path} from {start_s:g} s, for {duration_s} s; times must be finite and at least 0"
        )
    with _opened(path) as file:
        rate_Hz = int(file.samplerate)
        loudest = LOUDEST_G711 if file.subtype in ("ULAW", "ALAW") else FULL_SCALE
        first = round(start_s * rate_Hz)
        wanted = None if duration_s is None else round(duration_s * rate_Hz)
        promised = _promised_frames(path, file) - first
        table_TC = _frames(file, first, wanted)
    samples, mixed = _one_channel(table_TC, channel, path)
    # Clipping is checked before channels are averaged: the mean of a clipped and a quiet channel is not at full scale.
    unmixed_TC = table_TC if mixed else samples[:, None]
    if len(samples) == 0:
        raise AudioError("no samples", f"{path} from {start_s:g} s")
    if not np.isfinite(samples).all():
        raise AudioError("not finite", f"{path} has samples that are NaN or infinite")
    flaws = {
        "truncated": len(samples) < (promised if wanted is None else wanted - SHORTER_S * rate_Hz),
        "mixed to mono": mixed,
        "clipped": bool((np.mean(np.abs(unmixed_TC) >= loudest, axis=0) > CLIPPED_SHARE).any()),
        "silent": not samples.any(),
    }
    return Audio(samples, rate_Hz, tuple(name for name, found in flaws.items() if found))


def steady(audio: Audio) -> bool:
    """Whether the loudness hardly varies, as in noise or a hum: by less than STEADY_dB in nine tenths of the blocks."""
    size = audio.rate_Hz * STEADY_BLOCK_MS // 1000
    count = len(audio.samples) // size
    if count < STEADY_BLOCKS:
        return False
    power_N = audio.samples[: count * size].reshape(count, size).var(axis=1, dtype=np.float64)
    quiet, loud = np.percentile(power_N, (5, 95))
    return bool(loud < quiet * 10 ** (STEADY_dB / 10))


def audio_length_s(path: Path) -> tuple[float, int]:
    """Length in seconds and sample rate of a file, from its header."""
    with _opened(path) as file:
        return file.frames / file.samplerate, int(file.samplerate)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open SoundFile; errors of libsndfile become AudioError."""
    if not path.is_file():
        raise AudioError("missing file", f"there is no file '{path}'")
    if path.stat().st_size == 0:
        raise AudioError("empty file", f"'{path}' has 0 bytes")
    soundfile = soundfile_library()
    try:
        with soundfile.SoundFile(path) as file:
            yield file
    # TypeError: a file name such as a.raw says that the audio has no header.
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise AudioError("unreadable file", f"{path}: {_reason(path, error)}") from error


def resampled(samples: Samples, from_Hz: int, to_Hz: int) -> Samples:
    """The same sound at another rate: its spectrum is cut off, or continued with zeros, at the new Nyquist frequency.

    The last 4 % below the lower of the two Nyquist frequencies fade out, so that the filter rings for at most 3 ms.
    Zeros are appended first, because the Fourier transform is circular: the end would ring into the beginning.
    """
    if from_Hz == to_Hz:
        return samples
    up, down = to_Hz // math.gcd(from_Hz, to_Hz), from_Hz // math.gcd(from_Hz, to_Hz)
    blocks = _next_fast_length(-(-(len(samples) + from_Hz * GUARD_MS // 1000) // down))
    spectrum = np.fft.rfft(samples, blocks * down)
    kept = blocks * min(up, down) // 2 + 1
    fade = np.clip((1 - np.arange(kept) / kept) / FADE, 0, 1).astype(np.float32)
    longer = np.fft.irfft(spectrum[:kept] * fade, blocks * up) * (up / down)
    return np.asarray(longer[: -(-len(samples) * up // down)], dtype=np.float32)


def _next_fast_length(number: int) -> int:
    """The next number without prime factors above 5; fast Fourier transforms are fast for such lengths.

    >>> _next_fast_length(1021)
    1024
    """
    while True:
        rest = number
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return number
        number += 1


def soundfile_library() -> Any:  # noqa: ANN401  # a module
    """The library `soundfile`. Raises MissingExtraError if it is not installed."""
    return library("soundfile", "reading and writing audio")


def _frames(file: Any, first: int, count: int | None) -> Samples:  # noqa: ANN401  # a SoundFile
    """T×C samples; of a damaged file, the part before the damage."""
    if first >= file.frames:
        return np.zeros((0, file.channels), np.float32)
    file.seek(first)
    left = file.frames - first
    # Durations are rounded: if a piece ends less than 1 ms before the end of the file, read up to the end.
    if count is not None and count < left - file.samplerate / 1000:
        left = count
    blocks = []
    try:
        while left > 0:
            block = file.read(min(left, 1 << 20), dtype="float32", always_2d=True)
            blocks.append(block)
            left = left - len(block) if len(block) else 0
    except soundfile_library().LibsndfileError:
        if not blocks:
            file.seek(first)
            blocks = _salvaged(file)
    return np.concatenate(blocks) if blocks else np.zeros((0, file.channels), np.float32)


def _salvaged(file: Any) -> list[Samples]:  # noqa: ANN401  # a SoundFile
    """Small blocks of a damaged compressed file, up to the first that cannot be decoded."""
    blocks: list[Samples] = []
    try:
        while len(block := file.read(1024, dtype="float32", always_2d=True)):
            blocks.append(block)
    except soundfile_library().LibsndfileError:
        pass
    return blocks


def _one_channel(table_TC: Samples, channel: int | None, path: Path) -> tuple[Samples, bool]:
    channels = table_TC.shape[1]
    if channel is not None:
        if not 0 <= channel < channels:
            raise AudioError(
                "missing channel", f"{path} has {channels} channels, asked for channel {channel} (counted from 0)"
            )
        return np.ascontiguousarray(table_TC[:, channel]), False
    return table_TC.mean(axis=1, dtype=np.float32), channels > 1


def _promised_frames(path: Path, file: Any) -> int:  # noqa: ANN401  # a SoundFile
    """Frames according to the header. libsndfile derives their number from the size of the file, so truncation would not show."""
    if file.format == "NIST":
        with path.open("rb") as raw:
            count = re.search(rb"sample_count -i (\d+)", raw.read(1024))
        return int(count[1]) if count else int(file.frames)
    data = re.search(r"^data : (\d+) \(should be (\d+)\)", file.extra_info, re.MULTILINE)
    if data and 0 < int(data[2]) < int(data[1]) < 0xFFFFFFF0:  # in a stream of unknown length the field is all ones
        return int(file.frames) + 1  # any number above file.frames tells the caller that the file is truncated
    return int(file.frames)


def _reason(path: Path, error: Exception) -> str:
    with contextlib.suppress(OSError), path.open("rb") as raw:
        head = raw.read(1024)
        if head.startswith(b"NIST_1A") and b"shorten" in head:
            return "sphere compressed by shorten; uncompress it first (sph2pipe -p)"
    return (str(error).partition(": ")[2] or str(error)).splitlines()[0]
