"""fMLLR: an affine transform of a speaker's features that makes them most likely under given Gaussians (Gales 1998).

With ξ = (x, 1) and W = (A b) the transform is x' = W ξ. For frames t in components c with means μ and variances σ²,

    Q(W) = β log|det A| − ½ Σ_i (w_i G_i w_iᵀ − 2 w_i k_iᵀ)
    G_i = Σ_t ξ_t ξ_tᵀ / σ²_ci        k_i = Σ_t ξ_t μ_ci / σ²_ci        β = Σ_t 1

is the log likelihood of the frames x, up to a constant; log|det A| accounts for the change of volume. For one row w_i
at a time the maximum has a closed form, so Q never falls.

>>> frames = np.random.default_rng(0).standard_normal((500, 2))
>>> one = Gaussians(np.zeros((1, 2)), np.ones((1, 2)))
>>> W = RowStatistics.of(3 * frames + 1, np.zeros(500, np.int32), one).transform()
>>> bool(np.allclose(W[:, :2], np.eye(2) / 3, atol=0.1) and np.allclose(W[:, 2], -1 / 3, atol=0.1))
True
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundelay.speech.gaussians import Doubles, FramesByUtterance, Gaussians, Labelled, Mixtures
from roundelay.speech.hmm import Floats
from roundelay.speech.parallel import in_processes
from roundelay.speech.segments import Ints

SHRINKAGE = 200.0  # frames drawn from the model itself that are added to those of every speaker
_AT_ONCE = 500  # frames whose products ξ ξᵀ / σ² are in memory together
_SWEEPS = 10  # of one estimate, over all rows of W
_REASSIGNMENTS = 2  # of frames to components, each followed by a new estimate
_ADAPTIVE_ROUNDS = 3  # each estimates all transforms, then fits the Gaussians again


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """G_i, k_i and β: what the transform of a speaker depends on."""

    G: Doubles  # D×(D+1)×(D+1)
    k: Doubles  # D×(D+1)
    frames: float

    @classmethod
    def of(cls, frames_TD: NDArray[Any], components_T: Ints, gaussians: Gaussians) -> RowStatistics:
        """Statistics of frames, each in one component."""
        precision_TD = 1 / gaussians.variance_SD[components_T]
        extended_TE = np.concatenate([frames_TD, np.ones((len(frames_TD), 1))], axis=1)
        G = np.matmul(extended_TE.T, precision_TD.T[:, :, None] * extended_TE)
        k = (precision_TD * gaussians.mean_SD[components_T]).T @ extended_TE
        return cls(G, k, float(len(frames_TD)))

    @classmethod
    def expected(cls, gaussians: Gaussians, share_C: Doubles) -> RowStatistics:
        """Expected statistics of one frame drawn from the model. Their best transform is the identity."""
        mean, variance = gaussians.mean_SD, gaussians.variance_SD
        extended_CE = np.concatenate([mean, np.ones((len(mean), 1))], axis=1)
        weight_CD = share_C[:, None] / variance
        G = np.einsum("ci,cj,ck->ijk", weight_CD, extended_CE, extended_CE, optimize=True)
        diagonal = np.arange(mean.shape[1])
        G[:, diagonal, diagonal] += weight_CD.T @ variance
        return cls(G, (weight_CD * mean).T @ extended_CE, float(share_C.sum()))

    def __add__(self, other: RowStatistics) -> RowStatistics:
        return RowStatistics(self.G + other.G, self.k + other.k, self.frames + other.frames)

    def times(self, factor: float) -> RowStatistics:
        return RowStatistics(self.G * factor, self.k * factor, self.frames * factor)

    def transform(self, start: Doubles | None = None, sweeps: int = _SWEEPS) -> Doubles:
        """The W with the largest Q, found row by row from `start` (default: the identity)."""
        W = identity(len(self.k)) if start is None else start.copy()
        inverse = np.linalg.inv(self.G)
        for _ in range(sweeps):
            A_inverse: Doubles = np.linalg.inv(W[:, :-1]).astype(np.float64)
            for i in range(len(W)):
                row = self._row(i, A_inverse[:, i], inverse[i])
                # A changes by e_i dᵀ; Sherman and Morrison give its new inverse.
                change = (row - W[i])[:-1] @ A_inverse
                A_inverse -= np.outer(A_inverse[:, i], change) / (1 + change[i])
                W[i] = row
        return W

    def _row(self, i: int, cofactors_D: Doubles, inverse_EE: Doubles) -> Doubles:
        """w_i = (α p + k_i) G_i⁻¹, where α maximises β log|α a + b| − ½ α² a.

        p = (row i of the cofactors of A, 0), up to a factor, which α absorbs: column i of A⁻¹. With a = p G_i⁻¹ pᵀ and
        b = p G_i⁻¹ k_iᵀ, both zeros of the derivative solve α² a + α b − β = 0.
        """
        p_E = inverse_EE[:, :-1] @ cofactors_D
        a, b = p_E[:-1] @ cofactors_D, p_E @ self.k[i]
        root = math.sqrt(b * b + 4 * a * self.frames)
        alpha = max((-b + root, -b - root), key=lambda x: self.frames * math.log(abs(x / 2 + b)) - x * x / (8 * a)) / (
            2 * a
        )
        return np.asarray(alpha * p_E + inverse_EE @ self.k[i])


def identity(dimension: int) -> Doubles:
    """The transform that changes nothing."""
    return np.eye(dimension, dimension + 1)


def transformed(frames_TD: NDArray[Any], W: Doubles) -> Floats:
    """x' = A x + b of each frame."""
    return np.asarray(frames_TD @ W[:, :-1].T + W[:, -1], dtype=np.float32)


@dataclass(frozen=True, eq=False)
class SpeakerModel:
    """Gaussians of adapted features, with everything that a speaker's transform needs.

    Attributes:
        speech_S: which states are speech. Silence says little about a speaker, so its frames do not count.
        prior: expected statistics of SHRINKAGE frames of speech. With little data the transform stays near the identity.
    """

    mixtures: Mixtures
    speech_S: NDArray[np.bool_]
    prior: RowStatistics

    @classmethod
    def of(cls, mixtures: Mixtures, labels: Iterable[Ints], speech_S: NDArray[np.bool_]) -> SpeakerModel:
        """`labels` say how often each state occurs."""
        count_S = sum((np.bincount(each, minlength=len(speech_S)) for each in labels), np.zeros(len(speech_S)))
        share_C = np.repeat(count_S * speech_S, mixtures.number_S) * np.exp(mixtures.log_weight_C)
        expected = RowStatistics.expected(mixtures.components, share_C / share_C.sum())
        return cls(mixtures, speech_S, expected.times(SHRINKAGE))

    def transform(self, utterances: Sequence[tuple[NDArray[Any], Ints]]) -> Doubles:
        """The transform of one speaker, from frames and their states."""
        W = identity(len(self.prior.k))
        said = [(frames_TD[at], labels_T[at]) for frames_TD, labels_T in utterances for at in [self.speech_S[labels_T]]]
        if not said:
            return W
        frames_TD, labels_T = (np.concatenate(parts) for parts in zip(*said, strict=True))
        for _ in range(_REASSIGNMENTS):
            components_T = self.mixtures.nearest(transformed(frames_TD, W), labels_T)
            seen = self.prior
            for first in range(0, len(frames_TD), _AT_ONCE):
                block = slice(first, first + _AT_ONCE)
                seen = seen + RowStatistics.of(frames_TD[block], components_T[block], self.mixtures.components)
            W = seen.transform(W)
        return W


@dataclass(frozen=True, eq=False)
class Transformed:
    """Features that are transformed for their speaker when they are asked for."""

    features: FramesByUtterance
    transforms: Mapping[str, Doubles]
    speakers: Mapping[str, str]

    def __contains__(self, id: object) -> bool:
        return id in self.features

    def __getitem__(self, id: str) -> Floats:
        return transformed(self.features[id], self.transforms[self.speakers[id]])


def adaptive_training(
    features: FramesByUtterance,
    labels: Mapping[str, Ints],
    speakers: Mapping[str, str],
    mixtures: Mixtures,
    speech_S: NDArray[np.bool_],
) -> tuple[SpeakerModel, dict[str, Doubles]]:
    """Speaker-adaptive training: transforms of all speakers and Gaussians of the transformed features, in turn.

    `mixtures` were fitted to untransformed features. Without shrinkage, each step could only raise the likelihood.
    """
    by_speaker: dict[str, list[str]] = {}
    for name in labels:
        by_speaker.setdefault(speakers[name], []).append(name)
    for _ in range(_ADAPTIVE_ROUNDS):
        model = SpeakerModel.of(mixtures, labels.values(), speech_S)
        transforms = in_processes(_transforms, by_speaker, None, model, features, labels)
        mixtures = mixtures.refitted(Labelled(Transformed(features, transforms, speakers), labels))
    return SpeakerModel.of(mixtures, labels.values(), speech_S), transforms


def _transforms(
    share: Mapping[str, Sequence[str]], model: SpeakerModel, features: FramesByUtterance, labels: Mapping[str, Ints]
) -> dict[str, Doubles]:
    return {
        speaker: model.transform([(features[name], labels[name]) for name in names]) for speaker, names in share.items()
    }
