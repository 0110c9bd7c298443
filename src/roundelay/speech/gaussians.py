"""Acoustic models with one or a few Gaussians per state, and linear maps that make diagonal covariances suitable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundelay.speech.hmm import Floats
from roundelay.speech.segments import Ints

_VARIANCE_FLOOR = 0.01  # of the variance over all frames
_LEAST_VARIANCE = 1e-6  # of directions in which the features are constant
_REASSIGNMENTS = 5  # of all frames to newly fitted Gaussians, after each split of a cluster


@dataclass(frozen=True, eq=False)
class Statistics:
    """Number of frames of each state, their sum and the sum of their squares: enough to fit Gaussians."""

    count_S: NDArray[np.float64]
    sum_SD: NDArray[np.float64]
    square_SD: NDArray[np.float64]

    @classmethod
    def of(cls, frames: Iterable[NDArray[Any]], labels: Iterable[Ints], num_states: int) -> Statistics:
        """Statistics of labelled frames. One utterance at a time is in memory."""
        count, total, square = np.zeros(num_states), np.zeros((0, 0)), np.zeros((0, 0))
        for frames_TD, labels_T in zip(frames, labels, strict=True):
            if not total.size:
                total, square = np.zeros((2, num_states, frames_TD.shape[1]))
            # Labels come in runs: sum each run first, since np.add.at is slow.
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
        """Mean and variance of each state's frames. A state with too few frames gets those of all frames."""
        frames, count = seen.count_S.sum(), np.maximum(seen.count_S, 1)[:, None]
        overall_mean = seen.sum_SD.sum(axis=0) / frames
        overall_variance = seen.square_SD.sum(axis=0) / frames - overall_mean**2
        mean = np.where(seen.count_S[:, None] < 1, overall_mean, seen.sum_SD / count)
        variance = np.where(seen.count_S[:, None] < 2, overall_variance, seen.square_SD / count - mean**2)
        return cls(mean, np.maximum(variance, np.maximum(_VARIANCE_FLOOR * overall_variance, _LEAST_VARIANCE)))

    def log_likelihoods(self, frames_TD: NDArray[Any]) -> Floats:
        """T×S log N(x; μ_s, σ²_s) = −½ Σ_d [(x_d − μ_d)²/σ²_d + log 2πσ²_d], as two matrix products."""
        precision = 1 / self.variance_SD
        constant = (self.mean_SD**2 * precision + np.log(2 * np.pi * self.variance_SD)).sum(axis=1)
        quadratic, linear = precision.T.astype(np.float32), (2 * self.mean_SD * precision).T.astype(np.float32)
        frames = frames_TD.astype(np.float32)
        return np.asarray(-0.5 * (frames**2 @ quadratic - frames @ linear + constant), dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Mixtures:
    """One or several Gaussians per state: p(x | s) = max_c w_c N(x; μ_c, σ²_c) over the components c of s.

    The maximum takes the place of a sum, because Viterbi training assigns each frame to one component of one state.

    Attributes:
        components: all Gaussians; those of a state are adjacent.
        log_weight_C: log of the fraction of its state's frames that each component has.
        first_S: the first component of each state.
    """

    components: Gaussians
    log_weight_C: NDArray[np.float64]
    first_S: Ints

    @classmethod
    def fit(cls, frames: Sequence[NDArray[Any]], labels: Sequence[Ints], number_S: Ints) -> Mixtures:
        """Fit `number_S` components to the frames of each state."""
        first_S = (np.cumsum(number_S) - number_S).astype(np.int32)
        component = [first_S[labels_T] for labels_T in labels]
        for state in np.flatnonzero(number_S > 1):
            here = [labels_T == state for labels_T in labels]
            frames_ND = np.concatenate([frames_TD[at] for frames_TD, at in zip(frames, here, strict=True)])
            clusters = np.split(_clusters(frames_ND, number_S[state]), np.cumsum([at.sum() for at in here])[:-1])
            for component_T, at, cluster in zip(component, here, clusters, strict=True):
                component_T[at] += cluster
        seen = Statistics.of(frames, component, int(number_S.sum()))
        in_state_C = np.repeat(np.add.reduceat(seen.count_S, first_S), number_S)
        return cls(Gaussians.fit(seen), _log_share(seen.count_S, in_state_C), first_S)

    def log_likelihoods(self, frames_TD: NDArray[Any]) -> Floats:
        """T×S ln p(x | s)."""
        weighted_TC = self.components.log_likelihoods(frames_TD) + self.log_weight_C
        return np.asarray(np.maximum.reduceat(weighted_TC, self.first_S, axis=1), dtype=np.float32)


def _log_share(count: NDArray[np.float64], of: NDArray[np.float64]) -> NDArray[np.float64]:
    """ln(count / of); −∞ where count is 0, and 0 where `of` is 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.where(of > 0, count / np.maximum(of, 1), 1.0)))


def _clusters(frames_ND: NDArray[Any], number: int) -> Ints:
    """The cluster 0 … number − 1 of each frame.

    The largest cluster is split in two across its longest axis. Then, a few times, Gaussians are fitted to all clusters and
    each frame goes to the most likely one. This is repeated until there are `number` clusters.
    """
    cluster_N = np.zeros(len(frames_ND), dtype=np.int32)
    for new in range(1, number if len(frames_ND) else 1):
        inside = np.flatnonzero(cluster_N == np.bincount(cluster_N).argmax())
        mean, covariance = mean_and_covariance([frames_ND[inside]])
        above = (frames_ND[inside] - mean) @ principal_axes(covariance, 1)[:, 0] > 0
        cluster_N[inside[above]] = new
        for _ in range(_REASSIGNMENTS):
            seen = Statistics.of([frames_ND], [cluster_N], new + 1)
            log_weight = _log_share(seen.count_S, seen.count_S.sum())
            cluster_N = (Gaussians.fit(seen).log_likelihoods(frames_ND) + log_weight).argmax(axis=1).astype(np.int32)
    return cluster_N


def mean_and_covariance(frames: Iterable[NDArray[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and covariance of all frames of several utterances."""
    count, total, square = 0, np.zeros(1), np.zeros((1, 1))
    for frames_TD in frames:
        double = frames_TD.astype(np.float64)
        count, total, square = count + len(double), total + double.sum(axis=0), square + double.T @ double
    mean = total / count
    return mean, square / count - np.outer(mean, mean)


def principal_axes(covariance_DD: NDArray[np.float64], dimensions: int) -> NDArray[np.float64]:
    """D×k matrix of the directions of largest variance."""
    _, axes = np.linalg.eigh(covariance_DD)
    return np.asarray(axes[:, ::-1][:, :dimensions], dtype=np.float64)


def discriminant_axes(covariance_DD: NDArray[np.float64], seen: Statistics, dimensions: int) -> NDArray[np.float64]:
    """D×k matrix of the directions in which the states differ most (Fisher's linear discriminant analysis).

    The columns solve  S_between v = λ S_within v  with  vᵀ S_within v = 1.  With the Cholesky factor S_within = L Lᵀ and
    v = L⁻ᵀ u this is the ordinary eigenproblem  L⁻¹ S_between L⁻ᵀ u = λ u.
    """
    share = seen.count_S / seen.count_S.sum()
    means = seen.sum_SD / np.maximum(seen.count_S, 1)[:, None] - seen.sum_SD.sum(axis=0) / seen.count_S.sum()
    between = (means * share[:, None]).T @ means
    within = covariance_DD - between
    within += (1e-6 * np.trace(within) / len(within) + _LEAST_VARIANCE) * np.eye(len(within))
    inverse = np.linalg.inv(np.linalg.cholesky(within))
    _, rotated = np.linalg.eigh(inverse @ between @ inverse.T)
    return np.asarray((inverse.T @ rotated)[:, ::-1][:, :dimensions], dtype=np.float64)
