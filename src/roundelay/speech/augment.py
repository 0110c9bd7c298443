"""SpecAugment (Park et al. 2019): a random band of mel bins and a random run of frames of each window become zero.

Other augmentation is elsewhere: speed perturbation in `Corpus.speed_perturbed`, dropout in the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roundelay.training.config import at_least


@dataclass(frozen=True)
class AugmentConfig:
    """Random changes of the training data; 0 or empty for none.

    Attributes:
        shift: a window is moved by at most this many frames to either side.
        bins: at most this many adjacent mel bins of a window are set to zero.
        frames: at most this many adjacent frames of a window are set to zero.
        speeds: for each speed, copies of the training utterances are added.
    """

    shift: int = at_least(0, 10)
    bins: int = at_least(0, 0)
    frames: int = at_least(0, 0)
    speeds: tuple[float, ...] = ()


def masked(frames_BTF: Tensor, mel_bins: int, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Windows in which a random band of bins and a random run of frames are zero, which is the mean.

    The derivatives of a masked bin are masked too. Appended features (i-vectors) are not.
    """
    batch, time, features = frames_BTF.shape
    if config.bins:
        masked_BM = _random_runs(batch, mel_bins, config.bins, generator)
        blocks = 3 if features >= 3 * mel_bins else 1  # log energies, and their two derivatives if there are any
        appended = torch.zeros(batch, features - blocks * mel_bins, dtype=torch.bool)
        masked_BF = torch.cat([masked_BM] * blocks + [appended], dim=1)
        frames_BTF = frames_BTF.masked_fill(masked_BF[:, None, :], 0.0)
    if config.frames:
        frames_BTF = frames_BTF.masked_fill(_random_runs(batch, time, config.frames, generator)[:, :, None], 0.0)
    return frames_BTF


def _random_runs(batch: int, size: int, longest: int, generator: torch.Generator) -> Tensor:
    """B×size, true in one run of each row. Its length is uniform in 0 … longest, and its start is uniform too."""
    length_B1 = torch.randint(0, min(longest, size) + 1, (batch, 1), generator=generator)
    start_B1 = (torch.rand(batch, 1, generator=generator) * (size - length_B1 + 1)).long()
    index = torch.arange(size)
    return (index >= start_B1) & (index < start_B1 + length_B1)
