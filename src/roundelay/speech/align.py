"""Which frame belongs to which state: forced alignment, and a start from transcripts alone.

Forced alignment is decoding with a grammar that has one sentence. The flat start is Viterbi training: cut every utterance into
equal parts, then in turn

    fit one Gaussian to the frames of each state      μ_s, σ²_s
    align again under them                            argmax_π Σ_t log N(x_t; μ_{π(t)}, σ²_{π(t)}) + log a

Each of the two can only raise the total log likelihood. A linear map first makes the features suit diagonal covariances: the
principal axes to begin with, then, once there are states, the directions that tell them apart (linear discriminant analysis).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roundelay.errors import SpeechError
from roundelay.speech.decode import Decoder, Hypothesis, Scales, Search, in_processes
from roundelay.speech.gaussians import Gaussians, Statistics, discriminant_axes, principal_axes, scatter
from roundelay.speech.graph import Graph, alignment_graph
from roundelay.speech.hmm import Floats, Occurrences, Tying, self_loops, state_labels
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.segments import Ints

_BEAMS = (400.0, 1e6)  # graphs of one sentence are small: nearly everything, and if that is not enough, everything
_DIMENSIONS = 40  # kept by the linear map
_CONTEXT = 3  # frames to either side that the discriminant analysis sees
_ITERATIONS = 10  # at most, under each of the two maps
_CONVERGED = 1e-3  # relative gain below which another iteration is not worth its time


class Frames(Protocol):
    """Features by utterance: a FeatureSet, or any mapping of arrays."""

    def __getitem__(self, id: str, /) -> NDArray[Any]:
        """T×D."""


@dataclass(frozen=True, eq=False)
class Alignments:
    """States of every frame by utterance, and why some utterances have none."""

    labels: dict[str, Ints]
    failed: dict[str, str] = field(default_factory=dict)
    cost: float = 0.0  # of all paths together


@dataclass(frozen=True, eq=False)
class FlatStart:
    """Alignments from transcripts, and the total cost after each iteration, under the first and the second map."""

    alignments: Alignments
    costs: tuple[tuple[float, ...], tuple[float, ...]]


class Spoken(NamedTuple):
    """What was said, and how words sound."""

    texts: Mapping[str, str]
    lexicon: Lexicon


def forced_alignment(
    log_likelihoods_TS: ArrayLike, graph: Graph, loops: Floats | None = None, acoustic_scale: float = 1.0
) -> Hypothesis:
    """The best path of one utterance through the graph of its own sentence (`alignment_graph`).

    Raises SpeechError when the utterance has fewer frames than its sentence has states.
    """
    for beam in _BEAMS:
        decoder = Decoder(graph, loops, Scales(acoustic=acoustic_scale), Search(beam, max_active=2**31 - 1))
        found = decoder(log_likelihoods_TS)
        if found.complete and len(found.states_T):
            return found
    raise SpeechError(
        f"{len(np.asarray(log_likelihoods_TS))} frames are too few for what was said, or the text is wrong"
    )


def alignment_graphs(
    texts: Mapping[str, str], lexicon: Lexicon, tying: Tying
) -> tuple[dict[str, Graph], dict[str, str]]:
    """A graph for every transcript, and which ones have unknown words; they serve any number of alignments."""
    graphs: dict[str, Graph] = {}
    failed: dict[str, str] = {}
    for name, text in texts.items():
        try:
            graphs[name] = alignment_graph(lexicon, text.split(), tying)
        except SpeechError as error:
            failed[name] = str(error)
    return graphs, failed


def aligned(
    log_likelihoods: Mapping[str, ArrayLike],
    graphs: Mapping[str, Graph],
    loops: Floats | None = None,
    acoustic_scale: float = 1.0,
    workers: int | None = None,
) -> Alignments:
    """Align many utterances in parallel processes; with a network's likelihoods this is realignment."""
    jobs = {name: (np.asarray(log_likelihoods[name], np.float32), graph) for name, graph in graphs.items()}
    found = in_processes(_align_share, jobs, workers, loops, acoustic_scale)
    labels = {name: path.states_T for name, path in found.items() if isinstance(path, Hypothesis)}
    failed = {name: path for name, path in found.items() if isinstance(path, str)}
    return Alignments(labels, failed, sum(path.cost for path in found.values() if isinstance(path, Hypothesis)))


def _align_share(
    jobs: Mapping[str, tuple[Floats, Graph]], loops: Floats | None, acoustic_scale: float
) -> dict[str, Hypothesis | str]:
    found: dict[str, Hypothesis | str] = {}
    for name, (scores, graph) in jobs.items():
        try:
            found[name] = forced_alignment(scores, graph, loops, acoustic_scale)
        except SpeechError as error:
            found[name] = str(error)
    return found


def uniform_alignment(num_frames: int, words: Sequence[str], lexicon: Lexicon, tying: Tying) -> Ints:
    """Equal shares for all phones of the first pronunciations, with silence at both ends.

    Raises SpeechError when there are fewer frames than states.
    """
    said = [tying.number(phone) for word in words for phone in lexicon[word][0]]
    phones = np.array([0, *said, 0], dtype=np.int32)
    states = len(phones) * tying.states_per_phone
    if num_frames < states:
        raise SpeechError(f"{num_frames} frames are too few for the {states} states of what was said")
    starts = np.arange(len(phones)) * num_frames // len(phones)
    return state_labels(Occurrences(phones, starts.astype(np.int32), num_frames), tying)


def spliced(frames_TD: NDArray[Any]) -> NDArray[Any]:
    """Each frame with `_CONTEXT` neighbours to either side, the edges repeated; shape T × (2·context + 1)·D."""
    padded = np.pad(frames_TD, ((_CONTEXT, _CONTEXT), (0, 0)), mode="edge")
    return np.concatenate([padded[i : i + len(frames_TD)] for i in range(2 * _CONTEXT + 1)], axis=1)


def flat_start(
    features: Frames,
    texts: Mapping[str, str],
    lexicon: Lexicon,
    tying: Tying,
    workers: int | None = None,
) -> FlatStart:
    """State labels from features and transcripts alone; `tying` should be `Monophones`, for there is nothing to tie yet."""
    graphs, failed = alignment_graphs(texts, lexicon, tying)
    first: dict[str, Ints] = {}
    for name in graphs:
        try:
            first[name] = uniform_alignment(len(features[name]), texts[name].split(), lexicon, tying)
        except SpeechError as error:
            failed[name] = str(error)
    if not first:
        raise SpeechError(
            f"no utterance can be aligned; the first reason: {next(iter(failed.values()), 'there are none')}"
        )
    graphs = {name: graphs[name] for name in first}
    _, covariance = scatter(features[name] for name in first)
    axes = principal_axes(covariance, _DIMENSIONS)
    simple = {name: (np.asarray(features[name], np.float64) @ axes).astype(np.float32) for name in first}
    found, costs = _viterbi_training(simple, Alignments(first), graphs, tying.num_states, workers)
    sharp = _discriminant(simple, found, tying)
    found, more = _viterbi_training(sharp, found, graphs, tying.num_states, workers)
    return FlatStart(Alignments(found.labels, {**failed, **found.failed}, found.cost), (costs, more))


def aligned_alike(
    features: Frames, known: Mapping[str, Ints], spoken: Spoken, tying: Tying, workers: int | None = None
) -> Alignments:
    """Align further utterances by one Gaussian per state, fitted to the frames of those whose labels are known."""
    _, covariance = scatter(features[name] for name in known)
    raw = Statistics.of((features[name] for name in known), known.values(), tying.num_states)
    axes = discriminant_axes(covariance, raw, _DIMENSIONS)

    def seen(name: str) -> NDArray[np.float32]:
        return (np.asarray(features[name], np.float64) @ axes).astype(np.float32)

    gaussians = Gaussians.fit(Statistics.of(map(seen, known), known.values(), tying.num_states))
    graphs, failed = alignment_graphs(spoken.texts, spoken.lexicon, tying)
    scores = {name: gaussians.log_likelihoods(seen(name)) for name in graphs}
    found = aligned(scores, graphs, self_loops(known.values(), tying.num_states), workers=workers)
    return Alignments(found.labels, {**failed, **found.failed}, found.cost)


def _discriminant(
    features: Mapping[str, NDArray[Any]], found: Alignments, tying: Tying
) -> dict[str, NDArray[np.float32]]:
    """Features in the directions that tell the states apart, of a few frames together."""
    wide = {name: spliced(frames) for name, frames in features.items()}
    _, covariance = scatter(wide[name] for name in found.labels)
    seen = Statistics.of((wide[name] for name in found.labels), found.labels.values(), tying.num_states)
    axes = discriminant_axes(covariance, seen, _DIMENSIONS)
    return {name: (frames @ axes).astype(np.float32) for name, frames in wide.items()}


def _viterbi_training(
    features: Mapping[str, NDArray[Any]],
    found: Alignments,
    graphs: Mapping[str, Graph],
    num_states: int,
    workers: int | None,
) -> tuple[Alignments, tuple[float, ...]]:
    costs: list[float] = []
    while len(costs) < _ITERATIONS and not _converged(costs):
        seen = Statistics.of((features[name] for name in found.labels), found.labels.values(), num_states)
        gaussians = Gaussians.fit(seen)
        scores = {name: gaussians.log_likelihoods(features[name]) for name in graphs}
        found = aligned(scores, graphs, self_loops(found.labels.values(), num_states), workers=workers)
        costs.append(found.cost)
    return found, tuple(costs)


def _converged(costs: Sequence[float]) -> bool:
    return len(costs) > 1 and costs[-2] - costs[-1] < _CONVERGED * abs(costs[-1])
