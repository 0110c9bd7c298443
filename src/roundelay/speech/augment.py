"""SpecAugment (Park et al. 2019) on batches of windows: a band of bins and a stretch of frames are hidden.

Speed perturbation is a matter of the corpus (`Corpus.speed_perturbed`), dropout one of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roundelay.training.config import at_least


@dataclass(frozen=True)
class AugmentConfig:
    """What is random about a training window.

    Attributes:
        shift: frames by which it is moved to either side, at most.
        bins: of the mel bank that are hidden in it, at most.
        frames: of it that are hidden, at most.
        speeds: at which copies of the training utterances are heard beside the originals.
    """

    shift: int = at_least(0, 10)
    bins: int = at_least(0, 0)
    frames: int = at_least(0, 0)
    speeds: tuple[float, ...] = ()


def masked(frames_BTF: Tensor, mel_bins: int, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Windows with zeros, the mean of normalised features, in a band of bins and a stretch of frames of each.

    The derivatives of a hidden bin are hidden with it; features beside the mel bank (i-vectors) stay.
    """
    batch, time, features = frames_BTF.shape
    if config.bins:
        hidden_BM = _stretches(batch, mel_bins, config.bins, generator)
        blocks = 3 if features >= 3 * mel_bins else 1  # log energies, and their two derivatives if there are any
        beside = torch.zeros(batch, features - blocks * mel_bins, dtype=torch.bool)
        hidden_BF = torch.cat([hidden_BM] * blocks + [beside], dim=1)
        frames_BTF = frames_BTF.masked_fill(hidden_BF[:, None, :], 0.0)
    if config.frames:
        frames_BTF = frames_BTF.masked_fill(_stretches(batch, time, config.frames, generator)[:, :, None], 0.0)
    return frames_BTF


def _stretches(batch: int, size: int, most: int, generator: torch.Generator) -> Tensor:
    """B×size, true in one stretch of each row: its length uniform in 0 … most, its place anywhere."""
    length_B1 = torch.randint(0, min(most, size) + 1, (batch, 1), generator=generator)
    start_B1 = (torch.rand(batch, 1, generator=generator) * (size - length_B1 + 1)).long()
    place = torch.arange(size)
    return (place >= start_B1) & (place < start_B1 + length_B1)
