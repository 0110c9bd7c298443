"""i-vectors: a few numbers that say how a speaker's features differ from those of all speakers (Dehak et al. 2011).

The mean of component c of a universal background model (UBM) is μ_c + T_c w for a speaker with the i-vector w ~ N(0, I). With the
frames n_c and centred sums f_c of a speaker's statistics, w given the frames is Gaussian:

    L = I + Σ_c n_c T_cᵀ Σ_c⁻¹ T_c        b = Σ_c T_cᵀ Σ_c⁻¹ f_c        E[w] = L⁻¹ b        Cov[w] = L⁻¹

EM gives T:  T_c = (Σ_s f_cs E[w_s]ᵀ) (Σ_s n_cs E[w_s w_sᵀ])⁻¹ M^½, and log p(frames) = ½ bᵀ L⁻¹ b − ½ log|L| + constant never
falls. M = mean_s E[w_s w_sᵀ] makes w ~ N(0, I) again (Kenny's minimum divergence); without it EM takes hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundelay.speech.gaussians import Doubles, FramesByUtterance, Gaussians, Mixtures
from roundelay.speech.hmm import Floats

ITERATIONS = 10  # of EM
FRAME_WEIGHT = 0.1  # a frame counts as a tenth, because neighbouring frames are alike
_RIDGE = 1e-6  # keeps the M-step solvable for components without frames
_START = 0.1  # size of the random T that EM starts with, in standard deviations


@dataclass(frozen=True, eq=False)
class SpeakerStatistics:
    """Frames of each component, and the sum of their differences from its mean."""

    count_C: Doubles
    sum_CD: Doubles


@dataclass(frozen=True, eq=False)
class Ubm:
    """Gaussians of all speakers and sounds, with their weights."""

    gaussians: Gaussians
    log_weight_C: Doubles

    @classmethod
    def fit(cls, features: FramesByUtterance, lengths: dict[str, int], components: int) -> Ubm:
        """Fit the background model to the frames of the utterances whose `lengths` are given."""
        labels = {name: np.zeros(length, np.int32) for name, length in lengths.items()}
        mixtures = Mixtures.fit(features, labels, np.array([components], np.int32))
        return cls(mixtures.components, mixtures.log_weight_C)

    def statistics(self, utterances: Iterable[NDArray[Any]]) -> SpeakerStatistics:
        """Statistics of utterances of one speaker; each frame counts FRAME_WEIGHT."""
        mean = self.gaussians.mean_SD
        count, total = np.zeros(len(mean)), np.zeros_like(mean)
        for frames_TD in utterances:
            scores_TC = self.gaussians.log_likelihoods(frames_TD) + self.log_weight_C
            posterior_TC = np.exp(scores_TC - scores_TC.max(axis=1, keepdims=True))
            posterior_TC *= FRAME_WEIGHT / posterior_TC.sum(axis=1, keepdims=True)
            count += posterior_TC.sum(axis=0)
            total += posterior_TC.T @ frames_TD
        return SpeakerStatistics(count, total - count[:, None] * mean)


@dataclass(frozen=True, eq=False)
class IvectorExtractor:
    """The background model and its total-variability matrix T, C×D×R."""

    ubm: Ubm
    T: Doubles

    @classmethod
    def fit(cls, ubm: Ubm, speakers: Sequence[SpeakerStatistics], dimension: int) -> IvectorExtractor:
        """EM from a random T."""
        sigma = np.sqrt(ubm.gaussians.variance_SD)
        start = _START * np.random.default_rng(0).standard_normal((*sigma.shape, dimension))
        extractor = cls(ubm, sigma[:, :, None] * start)
        for _ in range(ITERATIONS):
            extractor, _ = extractor.improved(speakers)
        return extractor

    def improved(self, speakers: Sequence[SpeakerStatistics]) -> tuple[IvectorExtractor, float]:
        """One step of EM, and the log likelihood before it, without its constant."""
        components, dimensions, rank = self.T.shape
        by_mean = np.zeros((components, dimensions, rank))
        by_square = np.zeros((components, rank, rank)) + _RIDGE * np.eye(rank)
        spread, log_likelihood = np.zeros((rank, rank)), 0.0
        for seen in speakers:
            L, b = self._posterior(seen)
            mean = np.linalg.solve(L, b)
            second_moment = np.linalg.inv(L) + np.outer(mean, mean)
            spread += second_moment / len(speakers)
            log_likelihood += 0.5 * float(b @ mean) - 0.5 * float(np.linalg.slogdet(L)[1])
            by_mean += seen.sum_CD[:, :, None] * mean
            by_square += seen.count_C[:, None, None] * second_moment
        T = np.linalg.solve(by_square, by_mean.transpose(0, 2, 1)).transpose(0, 2, 1)
        return IvectorExtractor(self.ubm, T @ np.linalg.cholesky(spread)), log_likelihood

    def _posterior(self, seen: SpeakerStatistics) -> tuple[Doubles, Doubles]:
        """L and b."""
        scaled = self.T / self.ubm.gaussians.variance_SD[:, :, None]
        L = np.eye(self.T.shape[2]) + np.einsum("c,cdr,cds->rs", seen.count_C, scaled, self.T, optimize=True)
        return L, np.einsum("cdr,cd->r", scaled, seen.sum_CD)

    def __call__(self, utterances: Iterable[NDArray[Any]]) -> Floats:
        """The i-vector of one speaker, E[w], scaled so that its mean square is 1."""
        L, b = self._posterior(self.ubm.statistics(utterances))
        mean = np.linalg.solve(L, b)
        length = np.linalg.norm(mean)
        return np.asarray(mean * (np.sqrt(len(mean)) / length if length > 0 else 0.0), dtype=np.float32)
