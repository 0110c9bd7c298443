"""Acoustic models with one or several Gaussians per state, fitted utterance by utterance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from roundelay.speech.hmm import Floats
from roundelay.speech.segments import Ints

Doubles = NDArray[np.float64]

_VARIANCE_FLOOR = 0.01  # as a fraction of the variance over all frames
LEAST_VARIANCE = 1e-6  # of directions in which the features are constant
_SPLIT = 0.5  # a Gaussian is split into two that lie this many standard deviations to either side of its mean
_NUMBERS_AT_ONCE = 2**24  # frames × components in memory
BLOCK = 20_000  # frames that are assigned to components together
_REASSIGNMENTS = 6  # how often frames are assigned and Gaussians fitted again after each round of splits


class FramesByUtterance(Protocol):
    """Features of each utterance: a FeatureSet, or any mapping of arrays. Only one utterance at a time is used."""

    def __getitem__(self, id: str, /) -> NDArray[Any]:
        """T×D features of one utterance."""

    def __contains__(self, id: object, /) -> bool:
        """Whether there are features of an utterance."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """Number of frames of each state, their sum and the sum of their squares: enough to fit Gaussians."""

    count_S: Doubles
    sum_SD: Doubles
    square_SD: Doubles

    @classmethod
    def of(cls, labelled: Iterable[tuple[NDArray[Any], Ints]], num_states: int) -> Statistics:
        """Statistics of pairs of frames and their labels. One pair at a time is in memory."""
        count, total, square = np.zeros(num_states), np.zeros((0, 0)), np.zeros((0, 0))
        for frames_TD, labels_T in labelled:
            if not total.size:
                total, square = np.zeros((2, num_states, frames_TD.shape[1]))
            order = np.argsort(labels_T, kind="stable")
            states, starts, counts = np.unique(labels_T[order], return_index=True, return_counts=True)
            sorted_TD = frames_TD[order].astype(np.float64)
            total[states] += np.add.reduceat(sorted_TD, starts, axis=0)
            square[states] += np.add.reduceat(sorted_TD**2, starts, axis=0)
            count[states] += counts
        return cls(count, total, square)


@dataclass(frozen=True, eq=False)
class Gaussians:
    """One Gaussian with diagonal covariance per state."""

    mean_SD: Doubles
    variance_SD: Doubles

    @classmethod
    def fit(cls, seen: Statistics) -> Gaussians:
        """Mean and variance of each state's frames. A state with too few frames gets those of all frames."""
        frames, count = seen.count_S.sum(), np.maximum(seen.count_S, 1)[:, None]
        overall_mean = seen.sum_SD.sum(axis=0) / frames
        overall_variance = seen.square_SD.sum(axis=0) / frames - overall_mean**2
        mean = np.where(seen.count_S[:, None] < 1, overall_mean, seen.sum_SD / count)
        variance = np.where(seen.count_S[:, None] < 2, overall_variance, seen.square_SD / count - mean**2)
        return cls(mean, np.maximum(variance, np.maximum(_VARIANCE_FLOOR * overall_variance, LEAST_VARIANCE)))

    @cached_property
    def _products(self) -> tuple[Floats, Floats, Doubles]:
        precision = 1 / self.variance_SD
        constant = (self.mean_SD**2 * precision + np.log(2 * np.pi * self.variance_SD)).sum(axis=1)
        return precision.T.astype(np.float32), (2 * self.mean_SD * precision).T.astype(np.float32), constant

    def log_likelihoods(self, frames_TD: NDArray[Any], states: slice = slice(None)) -> Floats:
        """T×S log N(x; μ_s, σ²_s) = −½ Σ_d [(x_d − μ_d)²/σ²_d + log 2πσ²_d], as two matrix products."""
        quadratic, linear, constant = self._products
        frames = frames_TD.astype(np.float32)
        scores = frames**2 @ quadratic[:, states] - frames @ linear[:, states] + constant[states]
        return np.asarray(-0.5 * scores, dtype=np.float32)


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
    log_weight_C: Doubles
    first_S: Ints

    @classmethod
    def fit(cls, features: FramesByUtterance, labels: Mapping[str, Ints], number_S: Ints) -> Mixtures:
        """Fit `number_S` components to the frames of each state.

        Every state begins with one Gaussian. Then its heaviest Gaussians are split, until it has `number_S`. After each round of
        splits, frames go to the most likely Gaussian of their state and Gaussians are fitted again, a few times.
        """
        labelled = Labelled(features, labels)
        now_S = np.ones_like(number_S)
        seen = Statistics.of(labelled, len(number_S))
        fitted = cls._of(seen, now_S)
        while (now_S < number_S).any():
            fitted, now_S = fitted._split(seen.count_S, now_S, number_S)
            for _ in range(_REASSIGNMENTS):
                seen = fitted._assigned(labelled)
                fitted = cls._of(seen, now_S)
        return fitted

    def refitted(self, labelled: Iterable[tuple[NDArray[Any], Ints]]) -> Mixtures:
        """Mixtures fitted again: each frame goes to the most likely component of its state in the present mixtures."""
        return self._of(self._assigned(labelled), self.number_S)

    def _assigned(self, labelled: Iterable[tuple[NDArray[Any], Ints]]) -> Statistics:
        pairs = ((frames_TD, self.nearest(frames_TD, labels_T)) for frames_TD, labels_T in _blocks(labelled))
        return Statistics.of(pairs, len(self.log_weight_C))

    @cached_property
    def number_S(self) -> Ints:
        """Number of components of each state."""
        return np.diff(np.append(self.first_S, len(self.log_weight_C))).astype(np.int32)

    @classmethod
    def _of(cls, seen: Statistics, number_S: Ints) -> Mixtures:
        first_S = (np.cumsum(number_S) - number_S).astype(np.int32)
        in_state_C = np.repeat(np.add.reduceat(seen.count_S, first_S), number_S)
        with np.errstate(divide="ignore"):  # a component without frames has weight 0
            log_weight = np.log(np.where(in_state_C > 0, seen.count_S / np.maximum(in_state_C, 1), 1.0))
        return cls(Gaussians.fit(seen), log_weight, first_S)

    def _split(self, count_C: Doubles, now_S: Ints, wanted_S: Ints) -> tuple[Mixtures, Ints]:
        """Split the heaviest components of each state, each at most once; also return the new number per state."""
        grow_S = np.minimum(now_S, wanted_S - now_S)
        copies_C = np.ones(len(count_C), dtype=np.int32)
        for state in np.flatnonzero(grow_S > 0):
            first = self.first_S[state]
            heaviest = np.argsort(-count_C[first : first + now_S[state]], kind="stable")[: grow_S[state]]
            copies_C[first + heaviest] = 2
        of_C = np.repeat(np.arange(len(count_C)), copies_C)
        second = np.concatenate([[False], of_C[1:] == of_C[:-1]])
        side = np.where(copies_C[of_C] == 1, 0.0, np.where(second, _SPLIT, -_SPLIT))
        variance = self.components.variance_SD[of_C]
        mean = self.components.mean_SD[of_C] + side[:, None] * np.sqrt(variance)
        now_S = (now_S + np.maximum(grow_S, 0)).astype(np.int32)
        first_S = (np.cumsum(now_S) - now_S).astype(np.int32)
        log_weight = self.log_weight_C[of_C] - np.log(copies_C[of_C])
        return Mixtures(Gaussians(mean, variance), log_weight, first_S), now_S

    def nearest(self, frames_TD: NDArray[Any], labels_T: Ints) -> Ints:
        """The most likely component of each frame among those of its state."""
        component_T = self.first_S[labels_T]
        if not len(labels_T):
            return component_T
        order = np.argsort(labels_T, kind="stable")
        states, starts = np.unique(labels_T[order], return_index=True)
        for state, at in zip(states, np.split(order, starts[1:]), strict=True):
            first, number = self.first_S[state], self.number_S[state]
            if number > 1:
                inside = slice(first, first + number)
                scores = self.components.log_likelihoods(frames_TD[at], inside) + self.log_weight_C[inside]
                component_T[at] += scores.argmax(axis=1).astype(np.int32)
        return component_T

    def log_likelihoods(self, frames_TD: NDArray[Any]) -> Floats:
        """T×S ln p(x | s)."""
        scores_TS = np.empty((len(frames_TD), len(self.first_S)), np.float32)
        at_once = max(1, _NUMBERS_AT_ONCE // len(self.log_weight_C))
        for first in range(0, len(frames_TD), at_once):
            block = slice(first, first + at_once)
            weighted_TC = self.components.log_likelihoods(frames_TD[block]) + self.log_weight_C
            scores_TS[block] = np.maximum.reduceat(weighted_TC, self.first_S, axis=1)
        return scores_TS


def _blocks(labelled: Iterable[tuple[NDArray[Any], Ints]]) -> Iterator[tuple[NDArray[Any], Ints]]:
    """Utterances joined into blocks of about BLOCK frames.

    The loop over states takes little longer for a block than for one utterance.
    """
    frames: list[NDArray[Any]] = []
    labels: list[Ints] = []
    for frames_TD, labels_T in labelled:
        frames.append(frames_TD)
        labels.append(labels_T)
        if sum(map(len, labels)) >= BLOCK:
            yield np.concatenate(frames), np.concatenate(labels)
            frames, labels = [], []
    if labels:
        yield np.concatenate(frames), np.concatenate(labels)


@dataclass(frozen=True, eq=False)
class Labelled:
    """Pairs of frames and labels. Each iteration reads the frames again, so that they need not fit into memory."""

    features: FramesByUtterance
    labels: Mapping[str, Ints]

    def __iter__(self) -> Iterator[tuple[NDArray[Any], Ints]]:
        return ((self.features[name], labels_T) for name, labels_T in self.labels.items())
