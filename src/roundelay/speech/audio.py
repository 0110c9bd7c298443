"""Audio of any kind in, one channel at one rate out; a flaw is named, and what cannot be used says so in one line."""

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

from roundelay.errors import DataError, MissingExtraError
from roundelay.speech.corpus import Utterance

Samples: TypeAlias = NDArray[np.float32]

CLIPPED_SHARE = 1e-3  # of the samples at full scale: music is cut there on purpose, speech never is
FULL_SCALE = 0.999
LOUDEST_G711 = 0.98  # µ-law ends at 32124 of 32768, A-law at 32256
FADE, GUARD_MS = 0.04, 20  # of the low-pass when resampling
SHORTER_S = 0.05  # missing at the end before we call a file truncated; segment times are rounded


class AudioError(DataError):
    """Audio that cannot be used; `kind` is what it is counted under."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:  # exceptions with two arguments do not pickle by themselves
        return AudioError, (self.kind, self.detail)


@dataclass(frozen=True)
class Audio:
    """Samples in [-1, 1] of one channel, and what was found wrong with them."""

    samples: Samples
    rate_Hz: int
    flaws: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        """How long it is."""
        return len(self.samples) / self.rate_Hz


def utterance_audio(utterance: Utterance, rate_Hz: int | None = None) -> Audio:
    """The audio of an utterance at a rate, by default the file's own. Raises AudioError if there is none to be had."""
    if utterance.audio is None:
        raise AudioError("no audio", f"{utterance.id} comes without any")
    audio = read_audio(utterance.audio, utterance.channel, utterance.start_s, utterance.duration_s)
    target_Hz = rate_Hz or audio.rate_Hz
    samples = resampled(audio.samples, round(audio.rate_Hz * utterance.speed), target_Hz)
    return Audio(samples, target_Hz, audio.flaws)


def read_audio(path: Path, channel: int | None = None, start_s: float = 0.0, duration_s: float | None = None) -> Audio:
    """A piece of a file at its own rate: WAV, FLAC, sphere and all else that libsndfile reads, PCM, µ-law or float."""
    if not (0 <= start_s < math.inf and 0 <= (duration_s or 0) < math.inf):
        raise AudioError("bad times", f"{path} from {start_s:g} s, for {duration_s} s")
    with _opened(path) as file:
        rate_Hz = int(file.samplerate)
        loudest = LOUDEST_G711 if file.subtype in ("ULAW", "ALAW") else FULL_SCALE
        first = round(start_s * rate_Hz)
        wanted = None if duration_s is None else round(duration_s * rate_Hz)
        promised = _promised_frames(path, file) - first
        table_TC = _frames(file, first, wanted)
    samples, mixed = _one_channel(table_TC, channel, path)
    heard_TC = table_TC if mixed else samples[:, None]  # a channel that is cut off stays so, however quiet the other
    if len(samples) == 0:
        raise AudioError("no samples", f"{path} from {start_s:g} s")
    if not np.isfinite(samples).all():
        raise AudioError("not finite", f"{path} has samples that are no numbers")
    flaws = {
        "truncated": len(samples) < (promised if wanted is None else wanted - SHORTER_S * rate_Hz),
        "mixed to mono": mixed,
        "clipped": bool((np.mean(np.abs(heard_TC) >= loudest, axis=0) > CLIPPED_SHARE).any()),
        "silent": not samples.any(),
    }
    return Audio(samples, rate_Hz, tuple(name for name, found in flaws.items() if found))


def audio_length_s(path: Path) -> tuple[float, int]:
    """Seconds and samples per second of a file, by its header."""
    with _opened(path) as file:
        return file.frames / file.samplerate, int(file.samplerate)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A SoundFile; what libsndfile cannot do with it is an AudioError."""
    if not path.is_file():
        raise AudioError("missing file", str(path))
    if path.stat().st_size == 0:
        raise AudioError("empty file", str(path))
    soundfile = _soundfile()
    try:
        with soundfile.SoundFile(path) as file:
            yield file
    except (soundfile.SoundFileError, OSError, TypeError) as error:  # TypeError: headerless audio, by its name
        raise AudioError("unreadable file", f"{path}: {_reason(path, error)}") from error


def resampled(samples: Samples, from_Hz: int, to_Hz: int) -> Samples:
    """The same sound at another rate: its spectrum, cut off or continued with zeros at the new Nyquist frequency.

    The last 4 % below the lower of the two Nyquist frequencies fade out, so that the filter rings for 3 ms and no more;
    zeros at the end keep it from ringing around into the beginning.
    """
    if from_Hz == to_Hz:
        return samples
    up, down = to_Hz // math.gcd(from_Hz, to_Hz), from_Hz // math.gcd(from_Hz, to_Hz)
    blocks = _smooth(-(-(len(samples) + from_Hz * GUARD_MS // 1000) // down))
    spectrum = np.fft.rfft(samples, blocks * down)
    kept = blocks * min(up, down) // 2 + 1
    fade = np.clip((1 - np.arange(kept) / kept) / FADE, 0, 1).astype(np.float32)
    longer = np.fft.irfft(spectrum[:kept] * fade, blocks * up) * (up / down)
    return np.asarray(longer[: -(-len(samples) * up // down)], dtype=np.float32)


def _smooth(number: int) -> int:
    """The next number without prime factors above 5, which Fourier transforms like.

    >>> _smooth(1021)
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


def _soundfile() -> Any:  # noqa: ANN401  # a module
    try:
        import soundfile
    except ImportError as error:
        raise MissingExtraError("reading audio", "speech") from error
    return soundfile


def _frames(file: Any, first: int, count: int | None) -> Samples:  # noqa: ANN401  # a SoundFile
    """Frames × channels; of a file that breaks off, what can be had."""
    if first >= file.frames:
        return np.zeros((0, file.channels), np.float32)
    file.seek(first)
    left = file.frames - first
    if count is not None and count < left - file.samplerate / 1000:  # a length rounded to milliseconds cuts nothing off
        left = count
    blocks = []
    try:
        while left > 0:
            block = file.read(min(left, 1 << 20), dtype="float32", always_2d=True)
            blocks.append(block)
            left = left - len(block) if len(block) else 0
    except _soundfile().LibsndfileError:
        if not blocks:
            file.seek(first)
            blocks = _salvaged(file)
    return np.concatenate(blocks) if blocks else np.zeros((0, file.channels), np.float32)


def _salvaged(file: Any) -> list[Samples]:  # noqa: ANN401  # a SoundFile
    """Small blocks up to the one where a compressed file breaks."""
    blocks: list[Samples] = []
    try:
        while len(block := file.read(1024, dtype="float32", always_2d=True)):
            blocks.append(block)
    except _soundfile().LibsndfileError:
        pass
    return blocks


def _one_channel(table_TC: Samples, channel: int | None, path: Path) -> tuple[Samples, bool]:
    channels = table_TC.shape[1]
    if channel is not None:
        if not 0 <= channel < channels:
            raise AudioError("missing channel", f"{path} has {channels}, channel {channel} (from 0) was asked for")
        return np.ascontiguousarray(table_TC[:, channel]), False
    return table_TC.mean(axis=1, dtype=np.float32), channels > 1


def _promised_frames(path: Path, file: Any) -> int:  # noqa: ANN401  # a SoundFile
    """How many frames the header speaks of, where libsndfile believes the size of the file instead."""
    if file.format == "NIST":
        with path.open("rb") as raw:
            count = re.search(rb"sample_count -i (\d+)", raw.read(1024))
        return int(count[1]) if count else int(file.frames)
    data = re.search(r"^data : (\d+) \(should be (\d+)\)", file.extra_info, re.MULTILINE)
    if data and 0 < int(data[2]) < int(data[1]) < 0xFFFFFFF0:  # a stream of unknown length promises all ones
        return int(file.frames) + 1
    return int(file.frames)


def _reason(path: Path, error: Exception) -> str:
    with contextlib.suppress(OSError), path.open("rb") as raw:
        head = raw.read(1024)
        if head.startswith(b"NIST_1A") and b"shorten" in head:
            return "sphere compressed by shorten; uncompress it first (sph2pipe -p)"
    return (str(error).partition(": ")[2] or str(error)).splitlines()[0]
