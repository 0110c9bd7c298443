"""Forced alignment: the state of every frame when the words are known. It is decoding with a grammar of one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from roundelay.errors import SpeechError
from roundelay.speech.decode import Decoder, Hypothesis, Scales, Search
from roundelay.speech.graph import Graph, alignment_graph
from roundelay.speech.hmm import Floats, Tying
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.parallel import in_processes
from roundelay.speech.segments import Ints

_BEAMS = (400.0, 1e6)  # tried in turn; graphs of one sentence are small, so even the first search is nearly complete


@dataclass(frozen=True, eq=False)
class Alignments:
    """The state of every frame of each utterance, and the reason for each utterance that could not be aligned."""

    labels: dict[str, Ints]
    failed: dict[str, str] = field(default_factory=dict)
    cost: float = 0.0  # sum over the best paths of all aligned utterances


def forced_alignment(
    log_likelihoods_TS: ArrayLike, graph: Graph, loops: Floats | None = None, acoustic_scale: float = 1.0
) -> Hypothesis:
    """The best path of one utterance through the graph of its sentence (`alignment_graph`).

    Raises SpeechError if the utterance has fewer frames than its sentence has states.
    """
    for beam in _BEAMS:
        decoder = Decoder(graph, loops, Scales(acoustic=acoustic_scale), Search(beam, max_active=2**31 - 1))
        found = decoder(log_likelihoods_TS)
        if found.complete and len(found.states_T):
            return found
    raise SpeechError(
        f"{len(np.asarray(log_likelihoods_TS))} frames are too few for the transcript, or the transcript is wrong; "
        "correct it, or leave the utterance out"
    )


def alignment_graphs(
    texts: Mapping[str, str], lexicon: Lexicon, tying: Tying
) -> tuple[dict[str, Graph], dict[str, str]]:
    """A graph for every transcript, and a reason for each transcript with unknown words."""
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
    """Align many utterances in parallel processes. `loops` are the self-loop probabilities of the states."""
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
