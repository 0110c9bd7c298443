"""Sounds with known properties, and files of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile


def tone(frequency_Hz: float = 440.0, seconds: float = 0.5, rate_Hz: int = 16000, level: float = 0.3) -> np.ndarray:
    time_s = np.arange(round(seconds * rate_Hz)) / rate_Hz
    return (level * np.sin(2 * np.pi * frequency_Hz * time_s)).astype(np.float32)


def noise(seconds: float = 0.5, rate_Hz: int = 16000, seed: int = 0, level: float = 0.1) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(round(seconds * rate_Hz))
    return np.clip(level * drawn, -0.99, 0.99).astype(np.float32)


def save(path: Path, samples: np.ndarray, rate_Hz: int = 16000, subtype: str = "PCM_16") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    format = {"sph": "NIST", "wav": "WAV", "flac": "FLAC"}[path.suffix[1:]]
    soundfile.write(path, samples, rate_Hz, format=format, subtype=subtype)
    return path


def cut_off(path: Path, share: float = 0.5) -> Path:
    """Leave only the first part of a file, as a copy that broke off does."""
    whole = path.read_bytes()
    path.write_bytes(whole[: round(len(whole) * share)])
    return path
