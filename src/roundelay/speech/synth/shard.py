"""A hundred synthetic utterances, made by one fresh process: `python -m roundelay.speech.synth.shard FOLDER SHARD CONFIG`.

Utterance n depends only on the seed, not on the hours or the number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import DataError
from roundelay.speech.audio import resampled, soundfile_library
from roundelay.speech.synth.espeak import Espeak
from roundelay.speech.synth.lexicon import mnemonics, phones, stressed
from roundelay.speech.synth.sentences import sentence
from roundelay.speech.synth.speakers import SPEAKERS, speaker
from roundelay.speech.synth.timing import phone_spans

Samples: TypeAlias = NDArray[np.float64]
Row: TypeAlias = dict[str, Any]

SIZE = 100
RATE_Hz, TELEPHONE_Hz = 16000, 8000
TELEPHONE_BAND_Hz = (300, 3400)
PAUSES = 0.1  # fraction of the gaps between words that have a pause
EDGE_S = (0.1, 0.3)  # silence before and after an utterance: shortest, longest
LEVELS = (0.02, 0.12)  # root mean square of speech: lowest, highest
HISS = 1e-4  # level of a microphone's noise, always added: recordings have no exact zeros
SNR_SPREAD_dB = 5.0  # an utterance may differ by this much from the mean ratio
SPLIT_OF_TEN = ("train",) * 8 + ("valid", "test")


@dataclass(frozen=True)
class SynthConfig:
    """Settings of a synthetic corpus.

    Attributes:
        hours: hours of speech in all splits together; eight of ten utterances are for training.
        seed: of sentences, voices and noise.
        snr_dB: mean signal-to-noise ratio of added noise; None adds no noise.
        telephone: 8 kHz, 300 to 3400 Hz, µ-law.
    """

    hours: float = 0.5
    seed: int = 1
    snr_dB: float | None = None
    telephone: bool = False


def make_shard(folder: Path, shard: int, config: SynthConfig) -> list[Row]:
    """Write the audio of a shard. Returns a row for each utterance: columns of the manifest, and times of phones and words.

    An utterance is left out if espeak-ng has spoken other phonemes than it was given.
    """
    espeak = Espeak(seed=config.seed * 1_000_003 + shard)
    (folder / _audio_folder(shard)).mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(shard * SIZE, (shard + 1) * SIZE):
        with contextlib.suppress(DataError):
            rows.append(_make(espeak, folder, index, config))
    return rows


def _audio_folder(shard: int) -> Path:
    return Path("audio") / f"{shard:05d}"


def _make(espeak: Espeak, folder: Path, index: int, config: SynthConfig) -> Row:
    random = np.random.default_rng([config.seed, index])
    split = SPLIT_OF_TEN[index % 10]
    talker = speaker(split, int(random.integers(SPEAKERS[split])), config.seed)
    words = sentence(random)
    said = [stressed()[word][random.integers(len(stressed()[word]))] for word in words]
    voice = dataclasses.replace(talker.voice, rate=round(talker.voice.rate * random.uniform(0.9, 1.1)))
    gaps = ["[[_:]] " if random.random() < PAUSES else "" for _ in words]
    text = "".join(f"{gap}[[{mnemonics(one)}]] " for gap, one in zip(["", *gaps[1:]], said, strict=True))
    sound, events = espeak.say(voice, text)
    names = [phones(one) for one in said]
    spans = phone_spans(sound, events, sum(map(len, names)), espeak.rate_Hz)
    lead_s, tail_s = (round(random.uniform(*EDGE_S), 3) for _ in range(2))
    rate_Hz = TELEPHONE_Hz if config.telephone else RATE_Hz
    speech = resampled((sound / 32768).astype(np.float32), espeak.rate_Hz, rate_Hz).astype(np.float64)
    around = np.pad(speech, (round(lead_s * rate_Hz), round(tail_s * rate_Hz)))
    samples = _recorded(around, float(np.mean(speech**2)), config, random)
    path = _audio_folder(index // SIZE) / f"synth-{index:07d}.wav"
    soundfile_library().write(folder / path, samples, rate_Hz, subtype="ULAW" if config.telephone else "PCM_16")
    timed = [(name, lead_s + start, end - start) for name, (start, end) in zip(sum(names, ()), spans, strict=True)]
    return {
        "id": path.stem,
        "path": str(path),
        "split": split,
        "speaker": talker.name,
        "voice": talker.voice.name,
        "seconds": len(samples) / rate_Hz,
        "text": " ".join(words),
        "phones": timed,
        "words": _word_times(words, [len(name) for name in names], timed),
    }


def _word_times(
    words: tuple[str, ...], lengths: list[int], timed: list[tuple[str, float, float]]
) -> list[tuple[str, float, float]]:
    firsts = np.cumsum([0, *lengths])
    rows = []
    for word, first, after in zip(words, firsts[:-1], firsts[1:], strict=True):
        start, (_, last, length) = timed[first][1], timed[after - 1]
        rows.append((word, start, last + length - start))
    return rows


def _recorded(clean: Samples, power: float, config: SynthConfig, random: np.random.Generator) -> Samples:
    """Clean speech of the given power, as recorded by a microphone or over a telephone."""
    level = random.uniform(*LEVELS)
    recorded = clean * level / np.sqrt(power) + HISS * random.standard_normal(len(clean))
    if config.snr_dB is not None:
        snr_dB = config.snr_dB + random.uniform(-SNR_SPREAD_dB, SNR_SPREAD_dB)
        recorded += _noise(len(clean), random) * level * 10 ** (-snr_dB / 20)
    return np.clip(_through_telephone(recorded) if config.telephone else recorded, -1, 1)


def _noise(count: int, random: np.random.Generator) -> Samples:
    """Noise of power 1. The slope of its spectrum is random, between white and 1/f."""
    spectrum = np.fft.rfft(random.standard_normal(count))
    spectrum *= np.arange(1, len(spectrum) + 1) ** (-random.uniform(0, 0.5))
    noise = np.fft.irfft(spectrum, count)
    return np.asarray(noise / np.sqrt(np.mean(noise**2)))


def _through_telephone(samples: Samples) -> Samples:
    """Samples limited to the telephone band, with slopes of 100 Hz."""
    frequency_Hz = np.fft.rfftfreq(len(samples), 1 / TELEPHONE_Hz)
    low_Hz, high_Hz = TELEPHONE_BAND_Hz
    gain = np.clip(np.minimum(frequency_Hz - low_Hz, high_Hz - frequency_Hz) / 100 + 1, 0, 1)
    return np.fft.irfft(np.fft.rfft(samples) * gain, len(samples))


def main(folder: str, shard: str, config: str) -> None:
    """Make one shard and print its rows as JSON."""
    rows = make_shard(Path(folder), int(shard), SynthConfig(**json.loads(config)))
    json.dump(rows, sys.stdout)


def command(folder: Path, shard: int, config: SynthConfig) -> list[str]:
    """The command line of a process that makes this shard."""
    return [
        sys.executable,
        "-m",
        "roundelay.speech.synth.shard",
        str(folder),
        str(shard),
        json.dumps(dataclasses.asdict(config)),
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
