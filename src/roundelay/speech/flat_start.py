"""A start from transcripts alone: Viterbi training of Gaussians.

Cut every utterance into equal parts between where it first and last is loud, then in turn

    fit a Gaussian to the frames of each state        μ_s, σ²_s
    align again under them                            argmax_π Σ_t log N(x_t; μ_{π(t)}, σ²_{π(t)}) + log a

Each of the two can only raise the total log likelihood, as long as a state has one Gaussian. A linear map first makes features
suit diagonal covariances: the principal axes to begin with, then the directions that tell the states apart (linear
discriminant analysis).

Silence is the hard part. Utterances begin with much more of it than a phone is long, and phones that are given some at first
never let it go; hence the look at loudness. And it is no single sound but breath, clicks and the noise of each room: with
one Gaussian it loses frames to neighbours that are broad (HH, the closure of P), so it gets several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import SpeechError
from roundelay.speech.align import Alignments, aligned, alignment_graphs
from roundelay.speech.gaussians import Mixtures, Statistics, discriminant_axes, principal_axes, scatter
from roundelay.speech.graph import Graph
from roundelay.speech.hmm import Occurrences, Tying, self_loops, state_labels
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.segments import Ints

_DIMENSIONS = 40  # kept by the linear maps
_CONTEXT = 3  # frames to either side that the discriminant analysis sees
_ITERATIONS = 10  # at most, under each map
_CONVERGED = 1e-3  # relative gain below which another iteration is not worth its time
_SILENCES = 4  # Gaussians of each state of silence
_ENDS = 5  # frames of each end of an utterance that are taken to be quiet in most of them
_SMOOTHED = 5  # frames over which loudness is averaged
_MARGIN = 8  # frames before the first loud one and after the last: consonants are soft


class Frames(Protocol):
    """Features by utterance: a FeatureSet, or any mapping of arrays."""

    def __getitem__(self, id: str, /) -> NDArray[Any]:
        """T×D."""


class Spoken(NamedTuple):
    """What was said, and how words sound."""

    texts: Mapping[str, str]
    lexicon: Lexicon


class Span(NamedTuple):
    """Frames first … last − 1."""

    first: int
    last: int


@dataclass(frozen=True, eq=False)
class FlatStart:
    """Alignments from transcripts, and the total cost after each iteration under each of the maps."""

    alignments: Alignments
    costs: tuple[tuple[float, ...], ...]


def flat_start(
    features: Frames,
    texts: Mapping[str, str],
    lexicon: Lexicon,
    tying: Tying,
    workers: int | None = None,
) -> FlatStart:
    """State labels from features and transcripts alone; `tying` should be `Monophones`, for there is nothing to tie yet."""
    graphs, failed = alignment_graphs(texts, lexicon, tying)
    if not graphs:
        raise _nothing(failed)
    simple = _principal({name: features[name] for name in graphs}, graphs)
    first: dict[str, Ints] = {}
    for name, loudness_T in _loudness(simple).items():
        try:
            first[name] = uniform_alignment(len(loudness_T), loud_part(loudness_T), texts[name].split(), lexicon, tying)
        except SpeechError as error:
            failed[name] = str(error)
    if not first:
        raise _nothing(failed)
    graphs = {name: graphs[name] for name in first}
    found, costs = _viterbi_training(simple, Alignments(first), graphs, _gaussians(tying, silences=1), workers)
    stages = [costs]
    for _ in range(2):
        sharp = _discriminant(simple, found.labels, tying)
        found, costs = _viterbi_training(sharp, found, graphs, _gaussians(tying, _SILENCES), workers)
        stages.append(costs)
    return FlatStart(Alignments(found.labels, {**failed, **found.failed}, found.cost), tuple(stages))


def _nothing(failed: Mapping[str, str]) -> SpeechError:
    return SpeechError(
        f"no utterance can be aligned; the first reason: {next(iter(failed.values()), 'there are none')}"
    )


def aligned_alike(
    features: Frames, known: Mapping[str, Ints], spoken: Spoken, tying: Tying, workers: int | None = None
) -> Alignments:
    """Align further utterances by the Gaussians of those whose labels are known."""
    graphs, failed = alignment_graphs(spoken.texts, spoken.lexicon, tying)
    simple = _principal({name: features[name] for name in (*known, *graphs)}, known)
    sharp = _discriminant(simple, known, tying)
    found = _realigned(sharp, known, graphs, _gaussians(tying, _SILENCES), workers)
    return Alignments(found.labels, {**failed, **found.failed}, found.cost)


def uniform_alignment(num_frames: int, loud: Span, words: Sequence[str], lexicon: Lexicon, tying: Tying) -> Ints:
    """Equal shares of the loud part for all phones of the first pronunciations, and silence before and after it.

    Silence has as much as a phone where the loud part reaches the end of the utterance, or is too short for what was said.
    Raises SpeechError when there are fewer frames than states.
    """
    said = [tying.number(phone) for word in words for phone in lexicon[word][0]]
    phones = np.array([0, *said, 0], dtype=np.int32)
    least, share = tying.states_per_phone, num_frames // len(phones)
    if share < least:
        states = len(phones) * least
        raise SpeechError(f"{num_frames} frames are too few for the {states} states of what was said")
    first = max(loud.first, least) if loud.first else share
    last = min(loud.last, num_frames - least) if loud.last < num_frames else num_frames - share
    if last - first < len(said) * least:
        first, last = share, num_frames - share
    starts = [0, *(first + np.arange(len(said)) * (last - first) // max(len(said), 1)), last]
    return state_labels(Occurrences(phones, np.array(starts, dtype=np.int32), num_frames), tying)


def loud_part(loudness_T: NDArray[Any]) -> Span:
    """From the first to the last frame above the middle between quiet and loud (the 5th and the 95th percentile), and a margin.

    >>> loud_part(np.repeat([0.0, 1.0, 0.2, 1.0, 0.1], 20))
    Span(first=12, last=88)
    """
    around = np.pad(loudness_T, _SMOOTHED // 2, mode="edge")
    smooth_T = np.convolve(around, np.full(_SMOOTHED, 1 / _SMOOTHED), mode="valid")
    quiet, loud = np.percentile(smooth_T, [5, 95])
    above = np.flatnonzero(smooth_T >= (quiet + loud) / 2)
    return Span(max(0, int(above[0]) - _MARGIN), min(len(loudness_T), int(above[-1]) + 1 + _MARGIN))


def _loudness(features: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
    """How far each frame lies from what utterances begin and end with, in the direction of the mean of all: x · (μ − μ_ends)."""
    frames = [np.asarray(frames_TD, np.float64) for frames_TD in features.values()]
    ends = np.mean(
        [frames_TD[at].mean(axis=0) for frames_TD in frames for at in (slice(_ENDS), slice(-_ENDS, None))], axis=0
    )
    louder = np.mean([frames_TD.mean(axis=0) for frames_TD in frames], axis=0) - ends
    return {name: frames_TD @ louder for name, frames_TD in zip(features, frames, strict=True)}


def _principal(features: Mapping[str, NDArray[Any]], known: Iterable[str]) -> dict[str, NDArray[np.float32]]:
    """Features along the principal axes of those that are known."""
    _, covariance = scatter(features[name] for name in known)
    axes = principal_axes(covariance, _DIMENSIONS)
    return {name: (np.asarray(frames_TD, np.float64) @ axes).astype(np.float32) for name, frames_TD in features.items()}


def _discriminant(
    features: Mapping[str, NDArray[Any]], labels: Mapping[str, Ints], tying: Tying
) -> dict[str, NDArray[np.float32]]:
    """Features in the directions that tell the labelled states apart, of a few frames together."""
    wide = {name: spliced(frames) for name, frames in features.items()}
    _, covariance = scatter(wide[name] for name in labels)
    seen = Statistics.of((wide[name] for name in labels), labels.values(), tying.num_states)
    axes = discriminant_axes(covariance, seen, _DIMENSIONS)
    return {name: (frames @ axes).astype(np.float32) for name, frames in wide.items()}


def spliced(frames_TD: NDArray[Any]) -> NDArray[Any]:
    """Each frame with `_CONTEXT` neighbours to either side, the edges repeated; shape T × (2·context + 1)·D."""
    padded = np.pad(frames_TD, ((_CONTEXT, _CONTEXT), (0, 0)), mode="edge")
    return np.concatenate([padded[i : i + len(frames_TD)] for i in range(2 * _CONTEXT + 1)], axis=1)


def _gaussians(tying: Tying, silences: int) -> Ints:
    """How many each state has: one, but for silence."""
    return np.where(tying.phone_of_state == 0, silences, 1).astype(np.int32)


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
    """Fit to what is labelled, then align what has a graph."""
    mixtures = Mixtures.fit([features[name] for name in labels], list(labels.values()), number_S)
    scores = {name: mixtures.log_likelihoods(features[name]) for name in graphs}
    return aligned(scores, graphs, self_loops(labels.values(), len(number_S)), workers=workers)


def _converged(costs: Sequence[float]) -> bool:
    return len(costs) > 1 and costs[-2] - costs[-1] < _CONVERGED * abs(costs[-1])
