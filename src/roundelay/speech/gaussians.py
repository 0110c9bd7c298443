"""The simplest acoustic model: one Gaussian per state, and linear maps after which a diagonal covariance suits the features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundelay.speech.hmm import Floats
from roundelay.speech.segments import Ints

_VARIANCE_FLOOR = 0.01  # of the variance over all frames
_LEAST_VARIANCE = 1e-6  # of directions in which nothing varies, such as in silence


@dataclass(frozen=True, eq=False)
class Statistics:
    """Frames of each state, their sum and the sum of their squares: all that a Gaussian needs to know."""

    count_S: NDArray[np.float64]
    sum_SD: NDArray[np.float64]
    square_SD: NDArray[np.float64]

    @classmethod
    def of(cls, frames: Iterable[NDArray[Any]], labels: Iterable[Ints], num_states: int) -> Statistics:
        """Gathered utterance by utterance, so that memory does not grow with the corpus."""
        count, total, square = np.zeros(num_states), np.zeros((0, 0)), np.zeros((0, 0))
        for frames_TD, labels_T in zip(frames, labels, strict=True):
            if not total.size:
                total, square = np.zeros((2, num_states, frames_TD.shape[1]))
            # Labels come in runs; sums over runs leave little to scatter.
            starts = np.flatnonzero(np.diff(labels_T, prepend=-1))
            double = frames_TD.astype(np.float64)
            np.add.at(total, labels_T[starts], np.add.reduceat(double, starts, axis=0))
            np.add.at(square, labels_T[starts], np.add.reduceat(double**2, starts, axis=0))
            count += np.bincount(labels_T, minlength=num_states)
        return cls(count, total, square)


@dataclass(frozen=True, eq=False)
class Gaussians:
    """One Gaussian with diagonal covariance per state."""

    mean_SD: NDArray[np.float64]
    variance_SD: NDArray[np.float64]

    @classmethod
    def fit(cls, seen: Statistics) -> Gaussians:
        """Mean and variance of each state's frames; states without frames take those of all."""
        frames, count = seen.count_S.sum(), np.maximum(seen.count_S, 1)[:, None]
        overall = seen.sum_SD.sum(axis=0) / frames
        spread = seen.square_SD.sum(axis=0) / frames - overall**2
        rare = seen.count_S[:, None] < 2
        mean = np.where(seen.count_S[:, None] < 1, overall, seen.sum_SD / count)
        variance = np.where(rare, spread, seen.square_SD / count - mean**2)
        return cls(mean, np.maximum(variance, np.maximum(_VARIANCE_FLOOR * spread, _LEAST_VARIANCE)))

    def log_likelihoods(self, frames_TD: NDArray[Any]) -> Floats:
        """log N(x; μ_s, σ²_s) for all frames and states: −½ Σ_d [(x_d − μ_d)²/σ²_d + log 2πσ²_d], as two matrix products."""
        precision = 1 / self.variance_SD
        constant = (self.mean_SD**2 * precision + np.log(2 * np.pi * self.variance_SD)).sum(axis=1)
        quadratic, linear = precision.T.astype(np.float32), (2 * self.mean_SD * precision).T.astype(np.float32)
        frames = frames_TD.astype(np.float32)
        return np.asarray(-0.5 * (frames**2 @ quadratic - frames @ linear + constant), dtype=np.float32)


def scatter(frames: Iterable[NDArray[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and covariance of all frames."""
    count, total, square = 0, np.zeros(1), np.zeros((1, 1))
    for frames_TD in frames:
        double = frames_TD.astype(np.float64)
        count, total, square = count + len(double), total + double.sum(axis=0), square + double.T @ double
    mean = total / count
    return mean, square / count - np.outer(mean, mean)


def principal_axes(covariance_DD: NDArray[np.float64], dimensions: int) -> NDArray[np.float64]:
    """D × k, the directions of largest variance."""
    _, axes = np.linalg.eigh(covariance_DD)
    return np.asarray(axes[:, ::-1][:, :dimensions], dtype=np.float64)


def discriminant_axes(covariance_DD: NDArray[np.float64], seen: Statistics, dimensions: int) -> NDArray[np.float64]:
    """D × k, the directions in which the states differ most, scaled so that each state's covariance is near the identity.

    They solve  S_between v = λ S_within v  (Fisher).
    """
    from scipy.linalg import eigh

    share = seen.count_S / seen.count_S.sum()
    means = seen.sum_SD / np.maximum(seen.count_S, 1)[:, None] - seen.sum_SD.sum(axis=0) / seen.count_S.sum()
    between = (means * share[:, None]).T @ means
    within = covariance_DD - between
    within += (1e-6 * np.trace(within) / len(within) + _LEAST_VARIANCE) * np.eye(len(within))
    _, axes = eigh(between, within)
    return np.asarray(axes[:, ::-1][:, :dimensions], dtype=np.float64)
