"""The speakers of the synthetic corpus. Training, validation and test have different voices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundelay.speech.synth.espeak import Voice

ACCENTS = ("en-us", "en", "en-us-nyc", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan")
# espeak-ng's variants without echo, whisper or robot voice, and without clipping.
VARIANTS = {
    "train": (
        "m1", "f1", "m4", "f3", "m6", "belinda", "m7", "steph", "m8", "Annie", "max", "linda", "quincy", "michel", "adam",
        "benjamin", "Michael", "Reed",
    ),
    "valid": ("m5", "f5", "robert"),
    "test": ("m3", "f2", "rob"),
}  # fmt: skip
SPEAKERS = {"train": 54, "valid": 9, "test": 9}


@dataclass(frozen=True)
class Speaker:
    """A speaker; the rate of each utterance varies around the rate of the voice."""

    name: str
    voice: Voice


def speaker(split: str, number: int, seed: int) -> Speaker:
    """Speaker `number` of a split. Variants are taken in turn; accent, rate and pitch are drawn from the seed.

    >>> speaker("test", 4, seed=1).voice.name.split("+")[1]
    'f2'
    """
    random = np.random.default_rng([seed, list(VARIANTS).index(split), number])
    variants = VARIANTS[split]
    voice = Voice(
        name=f"{ACCENTS[random.integers(len(ACCENTS))]}+{variants[number % len(variants)]}",
        rate=int(random.integers(140, 211)),
        pitch=int(random.integers(30, 71)),
        range=int(random.integers(30, 71)),
    )
    return Speaker(f"{split}{number:02d}", voice)
