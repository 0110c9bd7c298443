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

Frames are read, projected and scored utterance by utterance, again in every iteration. Only labels and transcripts
stay in memory: the labels of an hour of speech take 1.4 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import SpeechError
from roundelay.speech.align import Alignments, Transcripts
from roundelay.speech.gaussians import FramesByUtterance
from roundelay.speech.gmm import Gmm
from roundelay.speech.hmm import Occurrences, Tying, state_labels
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.projection import Projection
from roundelay.speech.segments import Ints

DIMENSIONS = 40  # kept by the linear maps
ITERATIONS = 10  # at most, with each linear map
_CONVERGED = 1e-3  # iterations end when the relative gain is below this
_SILENCE_GAUSSIANS = 4  # of each state of silence
_ENDS = 5  # frames at each end of an utterance that are quiet in most utterances
_SMOOTHED = 5  # frames over which loudness is averaged
_MARGIN = 8  # frames added before the first and after the last loud frame, because consonants are soft


class Span(NamedTuple):
    """The frames first … last − 1."""

    first: int
    last: int


@dataclass(frozen=True, eq=False)
class FlatStart:
    """Alignments from transcripts, their last model, and the total cost after each iteration with each linear map."""

    alignments: Alignments
    model: Gmm
    costs: tuple[tuple[float, ...], ...]


def flat_start(
    features: FramesByUtterance, transcripts: Transcripts, workers: int | None = None, iterations: int = ITERATIONS
) -> FlatStart:
    """State labels from features and transcripts. The tying should be `Monophones`, since a tree needs labels first.

    Each of the three stages ends after `iterations`, or earlier when it has converged.
    """
    texts, lexicon, tying = transcripts
    failed = {
        name: f"not in the lexicon: {', '.join(words)}" for name in texts if (words := lexicon.unknown([texts[name]]))
    }
    known = [name for name in texts if name not in failed]
    found = _uniform_alignments(features, transcripts, known)
    failed |= found.failed
    found = Alignments(found.labels)
    if not found.labels:
        reason = next(iter(failed.values()), "there are no utterances")
        raise SpeechError(f"no utterance can be aligned; the first reason: {reason}")
    projection = Projection.principal(features, found.labels, DIMENSIONS)
    stages: list[tuple[float, ...]] = []
    for stage in range(3):
        if stage:  # the directions depend on the labels, which the stage before improves
            projection = projection.discriminating(features, found.labels, tying.num_states)
        number_S = np.where(tying.phone_of_state == 0, _SILENCE_GAUSSIANS if stage else 1, 1).astype(np.int32)
        costs: list[float] = []
        while len(costs) < iterations and not _converged(costs):
            model = Gmm.fit(features, found.labels, projection, number_S)
            found = model.aligned(features, transcripts, [*found.labels, *found.failed], workers)
            costs.append(found.cost)
        stages.append(tuple(costs))
    return FlatStart(Alignments(found.labels, failed | found.failed, found.cost), model, tuple(stages))


def _converged(costs: Sequence[float]) -> bool:
    return len(costs) > 1 and costs[-2] - costs[-1] < _CONVERGED * abs(costs[-1])


def _uniform_alignments(features: FramesByUtterance, transcripts: Transcripts, names: Sequence[str]) -> Alignments:
    texts, lexicon, tying = transcripts
    labels: dict[str, Ints] = {}
    failed: dict[str, str] = {}
    louder = _louder(features, names)
    for name in names:
        loudness_T = np.asarray(features[name], np.float64) @ louder
        try:
            labels[name] = uniform_alignment(
                len(loudness_T), loud_part(loudness_T), texts[name].split(), lexicon, tying
            )
        except SpeechError as error:
            failed[name] = str(error)
    return Alignments(labels, failed)


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
    """From the first to the last loud frame, with a margin. Loud: above the mean of the 5th and 95th percentiles.

    >>> loud_part(np.repeat([0.0, 1.0, 0.2, 1.0, 0.1], 20))
    Span(first=12, last=88)
    """
    around = np.pad(loudness_T, _SMOOTHED // 2, mode="edge")
    smooth_T = np.convolve(around, np.full(_SMOOTHED, 1 / _SMOOTHED), mode="valid")
    quiet, loud = np.percentile(smooth_T, [5, 95])
    above = np.flatnonzero(smooth_T >= (quiet + loud) / 2)
    return Span(max(0, int(above[0]) - _MARGIN), min(len(loudness_T), int(above[-1]) + 1 + _MARGIN))


def _louder(features: FramesByUtterance, names: Iterable[str]) -> NDArray[np.float64]:
    """The direction μ − μ_ends from the ends of utterances to the mean of all frames: loudness is x · (μ − μ_ends)."""
    direction = np.zeros(1)  # a sum, since only its sign and shape matter
    for name in names:
        frames_TD = np.asarray(features[name], np.float64)
        ends = (frames_TD[:_ENDS].mean(axis=0) + frames_TD[-_ENDS:].mean(axis=0)) / 2
        direction = direction + frames_TD.mean(axis=0) - ends
    return np.asarray(direction)
