"""Linear maps to few dimensions in which Gaussians with diagonal covariances are suitable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundelay.speech.gaussians import LEAST_VARIANCE, Doubles, FramesByUtterance, Labelled, Statistics
from roundelay.speech.hmm import Floats
from roundelay.speech.segments import Ints

CONTEXT = 3  # frames to either side that `spliced` includes


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map to few dimensions in which diagonal covariances are suitable.

    First the principal axes; then, with `discriminant`, the directions of each frame with its neighbours that separate the
    states best.
    """

    principal_DK: Doubles
    discriminant: Doubles | None = None

    @classmethod
    def principal(cls, features: FramesByUtterance, names: Iterable[str], dimensions: int) -> Projection:
        _, covariance = mean_and_covariance(features[name] for name in names)
        return cls(principal_axes(covariance, dimensions))

    def discriminating(self, features: FramesByUtterance, labels: Mapping[str, Ints], num_states: int) -> Projection:
        """A copy with discriminant directions for these labels, as many as there are principal axes."""
        wide = _Wide(features, self)
        _, covariance = mean_and_covariance(wide[name] for name in labels)
        seen = Statistics.of(Labelled(wide, labels), num_states)
        return Projection(self.principal_DK, discriminant_axes(covariance, seen, self.principal_DK.shape[1]))

    def __call__(self, frames_TD: NDArray[Any]) -> Floats:
        """T×K projected frames."""
        narrow = np.asarray(frames_TD, np.float32) @ self.principal_DK.astype(np.float32)
        return narrow if self.discriminant is None else spliced(narrow) @ self.discriminant.astype(np.float32)


@dataclass(frozen=True, eq=False)
class _Wide:
    """Features on the principal axes, each frame with its neighbours."""

    features: FramesByUtterance
    projection: Projection

    def __contains__(self, id: object) -> bool:
        return id in self.features

    def __getitem__(self, id: str) -> Floats:
        return spliced(Projection(self.projection.principal_DK)(self.features[id]))


@dataclass(frozen=True, eq=False)
class Projected:
    """Features that are projected when they are asked for. Can be pickled to other processes if the features can."""

    features: FramesByUtterance
    projection: Projection

    def __contains__(self, id: object) -> bool:
        return id in self.features

    def __getitem__(self, id: str) -> Floats:
        return self.projection(self.features[id])


def spliced(frames_TD: NDArray[Any]) -> NDArray[Any]:
    """Each frame with `CONTEXT` neighbours to either side, T×(2·context + 1)·D. Edges are repeated."""
    padded = np.pad(frames_TD, ((CONTEXT, CONTEXT), (0, 0)), mode="edge")
    return np.concatenate([padded[i : i + len(frames_TD)] for i in range(2 * CONTEXT + 1)], axis=1)


def mean_and_covariance(frames: Iterable[NDArray[Any]]) -> tuple[Doubles, Doubles]:
    """Mean and covariance of all frames of several utterances."""
    count, total, square = 0, np.zeros(1), np.zeros((1, 1))
    for frames_TD in frames:
        double = frames_TD.astype(np.float64)
        count, total, square = count + len(double), total + double.sum(axis=0), square + double.T @ double
    mean = total / count
    return mean, square / count - np.outer(mean, mean)


def principal_axes(covariance_DD: Doubles, dimensions: int) -> Doubles:
    """D×k matrix of the directions of largest variance."""
    _, axes = np.linalg.eigh(covariance_DD)
    return np.asarray(axes[:, ::-1][:, :dimensions], dtype=np.float64)


def discriminant_axes(covariance_DD: Doubles, seen: Statistics, dimensions: int) -> Doubles:
    """D×k matrix of the directions in which the states differ most (Fisher's linear discriminant analysis).

    The columns solve  S_between v = λ S_within v  with  vᵀ S_within v = 1.  With the Cholesky factor S_within = L Lᵀ and
    v = L⁻ᵀ u this is the ordinary eigenproblem  L⁻¹ S_between L⁻ᵀ u = λ u.
    """
    share = seen.count_S / seen.count_S.sum()
    means = seen.sum_SD / np.maximum(seen.count_S, 1)[:, None] - seen.sum_SD.sum(axis=0) / seen.count_S.sum()
    between = (means * share[:, None]).T @ means
    within = covariance_DD - between
    within += (1e-6 * np.trace(within) / len(within) + LEAST_VARIANCE) * np.eye(len(within))
    inverse = np.linalg.inv(np.linalg.cholesky(within))
    _, rotated = np.linalg.eigh(inverse @ between @ inverse.T)
    return np.asarray((inverse.T @ rotated)[:, ::-1][:, :dimensions], dtype=np.float64)
