"""A language that a tiny network learns in a second: every phone is a tone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

from roundelay.training.config import Config
from roundelay.training.recipes import resolve

RATE_Hz = 16000
TONES_Hz = {"A": 400, "B": 1200, "C": 3000}
WORDS = {"ABBA": "A B A", "CAB": "C A B", "BACK": "B C", "CC": "C A C"}
PHONE_S, SILENCE_S = 0.08, 0.1
COUNTS = {"train": 24, "valid": 6, "test": 6}


def write_tones(folder: Path, *, alignments: bool = True, seed: int = 0, counts: dict[str, int] = COUNTS) -> Path:
    """A manifest folder with a lexicon, three words in each utterance, and exact phone times."""
    rng = np.random.default_rng(seed)
    for each in ("wav", "align", "lexicon"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    (folder / "lexicon" / "tones.dic").write_text("".join(f"{word} {phones}\n" for word, phones in WORDS.items()))
    rows, times = ["path\tsplit\tspeaker\ttext\n"], []
    for split, count in counts.items():
        for number in range(count):
            name, words = f"{split}{number:03}", [str(word) for word in rng.choice(list(WORDS), 3)]
            phones = ["SIL", *(phone for word in words for phone in WORDS[word].split()), "SIL"]
            samples = spoken(phones, rng)
            soundfile.write(folder / "wav" / f"{name}.wav", samples, RATE_Hz)
            rows.append(f"wav/{name}.wav\t{split}\t{split}-{number % 3}\t{' '.join(words)}\n")
            times += ctm(name, phones)
    (folder / "manifest.tsv").write_text("".join(rows))
    if alignments:
        (folder / "align" / "phones.ctm").write_text("".join(times))
    return folder


def spoken(phones: list[str], rng: np.random.Generator) -> np.ndarray:
    """Phases and loudness vary from phone to phone, and there is some hiss."""
    pieces = []
    for phone in phones:
        t = np.arange(round(_length_s(phone) * RATE_Hz)) / RATE_Hz
        tone = 0 * t if phone == "SIL" else np.sin(2 * np.pi * TONES_Hz[phone] * t + rng.uniform(0, 6))
        pieces.append(rng.uniform(0.1, 0.2) * tone)
    samples = np.concatenate(pieces)
    return samples + 0.003 * rng.standard_normal(len(samples))


def _length_s(phone: str) -> float:
    return SILENCE_S if phone == "SIL" else PHONE_S


def ctm(name: str, phones: list[str]) -> list[str]:
    lines, start = [], 0.0
    for phone in phones:
        lines.append(f"{name} 1 {start:.3f} {_length_s(phone):.3f} {phone}\n")
        start += _length_s(phone)
    return lines


def tones_config(folder: Path, epochs: float = 15.0, **settings: object) -> Config:
    """A run of two asynchronous learners on it."""
    model = {"layers": 1, "width": 16, "bottleneck": 12, "dropout": 0.0}
    return resolve(
        {
            "task": "roundelay.speech.task:Speech",
            "learners": 2,
            "settings": {"corpus": "manifest", "data": str(folder), "model": model} | settings,
            "data": {"batch": 8},
            "budget": {"epochs": epochs},
            "optimizer": {"name": "adam", "lr": 0.02},
            "schedule": {"shape": "cosine"},
            "checkpoint": {"every_epochs": epochs},
        }
    )
