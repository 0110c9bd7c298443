"""State labels from transcripts alone: Viterbi training of Gaussians.

First the loud part of every utterance is divided equally among its phones. Then two steps alternate:

    fit Gaussians to the frames of each state        μ_s, σ²_s
    align again with these Gaussians                 argmax_π Σ_t log N(x_t; μ_{π(t)}, σ²_{π(t)}) + log a

With one Gaussian per state, both steps can only raise the total log likelihood. A linear map makes the features suitable
for diagonal covariances: principal axes at first, then linear discriminant analysis.

Silence needs care. Utterances begin and end with silence that is longer than a phone. If a phone gets some of this silence at
first, training never takes it back; this is why only the loud part is divided. Also, silence is not one sound, but breath,
clicks and the noise of each room. With one Gaussian it would lose frames to phones with broad Gaussians (HH, the closure of
P), so it gets several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import SpeechError
from roundelay.speech.align import Alignments, aligned, alignment_graphs
from roundelay.speech.gaussians import Mixtures, Statistics, discriminant_axes, mean_and_covariance, principal_axes
from roundelay.speech.graph import Graph
from roundelay.speech.hmm import Occurrences, Tying, self_loops, state_labels
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.segments import Ints

_DIMENSIONS = 40  # kept by the linear maps
_CONTEXT = 3  # frames to either side that the discriminant analysis includes
_ITERATIONS = 10  # at most, with each linear map
_CONVERGED = 1e-3  # iterations end when the relative gain is below this
_SILENCE_GAUSSIANS = 4  # of each state of silence
_ENDS = 5  # frames at each end of an utterance that are quiet in most utterances
_SMOOTHED = 5  # frames over which loudness is averaged
_MARGIN = 8  # frames added before the first and after the last loud frame, because consonants are soft


class FramesByUtterance(Protocol):
    """Features of each utterance: a FeatureSet, or any mapping of arrays."""

    def __getitem__(self, id: str, /) -> NDArray[Any]:
        """T×D features of one utterance."""


class Transcripts(NamedTuple):
    """The text of each utterance, and the pronunciations of its words."""

    texts: Mapping[str, str]
    lexicon: Lexicon


class Span(NamedTuple):
    """The frames first … last − 1."""

    first: int
    last: int


@dataclass(frozen=True, eq=False)
class FlatStart:
    """Alignments from transcripts, and the total cost after each iteration with each linear map."""

    alignments: Alignments
    costs: tuple[tuple[float, ...], ...]


def flat_start(
    features: FramesByUtterance,
    texts: Mapping[str, str],
    lexicon: Lexicon,
    tying: Tying,
    workers: int | None = None,
) -> FlatStart:
    """State labels from features and transcripts. `tying` should be `Monophones`, since no tree can be grown before."""
    graphs, failed = alignment_graphs(texts, lexicon, tying)
    if not graphs:
        raise _nothing_aligned(failed)
    principal = _principal({name: features[name] for name in graphs}, graphs)
    first: dict[str, Ints] = {}
    for name, loudness_T in _loudness(principal).items():
        try:
            first[name] = uniform_alignment(len(loudness_T), loud_part(loudness_T), texts[name].split(), lexicon, tying)
        except SpeechError as error:
            failed[name] = str(error)
    if not first:
        raise _nothing_aligned(failed)
    graphs = {name: graphs[name] for name in first}
    found, costs = _viterbi_training(principal, Alignments(first), graphs, _number_of_gaussians(tying, 1), workers)
    stages = [costs]
    for _ in range(2):  # the directions depend on the labels, which the first pass improves
        discriminant = _discriminant(principal, found.labels, tying)
        number_S = _number_of_gaussians(tying, _SILENCE_GAUSSIANS)
        found, costs = _viterbi_training(discriminant, found, graphs, number_S, workers)
        stages.append(costs)
    return FlatStart(Alignments(found.labels, {**failed, **found.failed}, found.cost), tuple(stages))


def _nothing_aligned(failed: Mapping[str, str]) -> SpeechError:
    return SpeechError(
        f"no utterance can be aligned; the first reason: {next(iter(failed.values()), 'there are no utterances')}"
    )


def aligned_by_known(
    features: FramesByUtterance,
    known: Mapping[str, Ints],
    transcripts: Transcripts,
    tying: Tying,
    workers: int | None = None,
) -> Alignments:
    """Align further utterances with Gaussians that are fitted to utterances with known labels."""
    graphs, failed = alignment_graphs(transcripts.texts, transcripts.lexicon, tying)
    principal = _principal({name: features[name] for name in (*known, *graphs)}, known)
    discriminant = _discriminant(principal, known, tying)
    found = _realigned(discriminant, known, graphs, _number_of_gaussians(tying, _SILENCE_GAUSSIANS), workers)
    return Alignments(found.labels, {**failed, **found.failed}, found.cost)


def uniform_alignment(num_frames: int, loud: Span, words: Sequence[str], lexicon: Lexicon, tying: Tying) -> Ints:
    """The loud part, divided equally among the phones of the first pronunciations, with silence before and after.

    If the loud part reaches an end of the utterance, or is too short for its phones, silence gets as much as a phone.
    Raises SpeechError if there are fewer frames than states.
    """
    said = [tying.number(phone) for word in words for phone in lexicon[word][0]]
    phones = np.array([0, *said, 0], dtype=np.int32)
    shortest, share = tying.states_per_phone, num_frames // len(phones)
    if share < shortest:
        states = len(phones) * shortest
        raise SpeechError(f"{num_frames} frames are too few for the {states} states of the transcript")
    first = max(loud.first, shortest) if loud.first else share
    last = min(loud.last, num_frames - shortest) if loud.last < num_frames else num_frames - share
    if last - first < len(said) * shortest:
        first, last = share, num_frames - share
    starts = [0, *(first + np.arange(len(said)) * (last - first) // max(len(said), 1)), last]
    return state_labels(Occurrences(phones, np.array(starts, dtype=np.int32), num_frames), tying)


def loud_part(loudness_T: NDArray[Any]) -> Span:
    """From the first to the last loud frame, with a margin. Loud: above the middle of the 5th and 95th percentile.

    >>> loud_part(np.repeat([0.0, 1.0, 0.2, 1.0, 0.1], 20))
    Span(first=12, last=88)
    """
    around = np.pad(loudness_T, _SMOOTHED // 2, mode="edge")
    smooth_T = np.convolve(around, np.full(_SMOOTHED, 1 / _SMOOTHED), mode="valid")
    quiet, loud = np.percentile(smooth_T, [5, 95])
    above = np.flatnonzero(smooth_T >= (quiet + loud) / 2)
    return Span(max(0, int(above[0]) - _MARGIN), min(len(loudness_T), int(above[-1]) + 1 + _MARGIN))


def _loudness(features: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
    """x · (μ − μ_ends) of each frame x: how far it lies from the ends of utterances towards the mean of all frames."""
    frames = [np.asarray(frames_TD, np.float64) for frames_TD in features.values()]
    ends = np.mean(
        [frames_TD[at].mean(axis=0) for frames_TD in frames for at in (slice(_ENDS), slice(-_ENDS, None))], axis=0
    )
    louder = np.mean([frames_TD.mean(axis=0) for frames_TD in frames], axis=0) - ends
    return {name: frames_TD @ louder for name, frames_TD in zip(features, frames, strict=True)}


def _principal(features: Mapping[str, NDArray[Any]], known: Iterable[str]) -> dict[str, NDArray[np.float32]]:
    """Features projected on the principal axes of the utterances `known`."""
    _, covariance = mean_and_covariance(features[name] for name in known)
    axes = principal_axes(covariance, _DIMENSIONS)
    return {name: (np.asarray(frames_TD, np.float64) @ axes).astype(np.float32) for name, frames_TD in features.items()}


def _discriminant(
    features: Mapping[str, NDArray[Any]], labels: Mapping[str, Ints], tying: Tying
) -> dict[str, NDArray[np.float32]]:
    """Each frame with its neighbours, projected on the directions that separate the labelled states best."""
    wide = {name: spliced(frames) for name, frames in features.items()}
    _, covariance = mean_and_covariance(wide[name] for name in labels)
    seen = Statistics.of((wide[name] for name in labels), labels.values(), tying.num_states)
    axes = discriminant_axes(covariance, seen, _DIMENSIONS)
    return {name: (frames @ axes).astype(np.float32) for name, frames in wide.items()}


def spliced(frames_TD: NDArray[Any]) -> NDArray[Any]:
    """Each frame with `_CONTEXT` neighbours to either side, T×(2·context + 1)·D. Edges are repeated."""
    padded = np.pad(frames_TD, ((_CONTEXT, _CONTEXT), (0, 0)), mode="edge")
    return np.concatenate([padded[i : i + len(frames_TD)] for i in range(2 * _CONTEXT + 1)], axis=1)


def _number_of_gaussians(tying: Tying, of_silence: int) -> Ints:
    """One Gaussian for each state, except the states of silence."""
    return np.where(tying.phone_of_state == 0, of_silence, 1).astype(np.int32)


def _viterbi_training(
    features: Mapping[str, NDArray[Any]],
    found: Alignments,
    graphs: Mapping[str, Graph],
    number_S: Ints,
    workers: int | None,
) -> tuple[Alignments, tuple[float, ...]]:
    costs: list[float] = []
    while len(costs) < _ITERATIONS and not _converged(costs):
        found = _realigned(features, found.labels, graphs, number_S, workers)
        costs.append(found.cost)
    return found, tuple(costs)


def _realigned(
    features: Mapping[str, NDArray[Any]],
    labels: Mapping[str, Ints],
    graphs: Mapping[str, Graph],
    number_S: Ints,
    workers: int | None,
) -> Alignments:
    """Fit Gaussians to the labelled utterances, then align the utterances that have a graph."""
    mixtures = Mixtures.fit([features[name] for name in labels], list(labels.values()), number_S)
    scores = {name: mixtures.log_likelihoods(features[name]) for name in graphs}
    return aligned(scores, graphs, self_loops(labels.values(), len(number_S)), workers=workers)


def _converged(costs: Sequence[float]) -> bool:
    return len(costs) > 1 and costs[-2] - costs[-1] < _CONVERGED * abs(costs[-1])
