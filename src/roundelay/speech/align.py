"""Forced alignment: which frame belongs to which state of what was said. It is decoding with a grammar that has one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from roundelay.errors import SpeechError
from roundelay.speech.decode import Decoder, Hypothesis, Scales, Search, in_processes
from roundelay.speech.graph import Graph, alignment_graph
from roundelay.speech.hmm import Floats, Tying
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.segments import Ints

_BEAMS = (400.0, 1e6)  # graphs of one sentence are small: nearly everything, and if that is not enough, everything


@dataclass(frozen=True, eq=False)
class Alignments:
    """States of every frame by utterance, and why some utterances have none."""

    labels: dict[str, Ints]
    failed: dict[str, str] = field(default_factory=dict)
    cost: float = 0.0  # of all paths together


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
