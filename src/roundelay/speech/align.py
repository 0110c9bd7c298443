"""Forced alignment: the state of every frame when the words are known. It is decoding with a grammar of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roundelay.errors import SpeechError
from roundelay.speech.decode import Decoder, Hypothesis, Scales, Search
from roundelay.speech.graph import Graph, alignment_graph
from roundelay.speech.hmm import Floats, Tying
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.parallel import in_processes
from roundelay.speech.segments import Ints

_BEAMS = (400.0, 1e6)  # tried in turn; graphs of one sentence are small, so even the first search is nearly complete


class Transcripts(NamedTuple):
    """The text of each utterance, the pronunciations of its words, and the states of their phones."""

    texts: Mapping[str, str]
    lexicon: Lexicon
    tying: Tying

    def graph(self, name: str) -> Graph:
        """The graph of one utterance. Raises SpeechError for words that are not in the lexicon."""
        return alignment_graph(self.lexicon, self.texts[name].split(), self.tying)


class Aligner(NamedTuple):
    """How frames are scored and aligned.

    Attributes:
        score: gives T×S log likelihoods of one utterance. Must be picklable.
        self_loops: the probabilities of staying in each state.
    """

    score: Callable[[NDArray[Any]], ArrayLike]
    self_loops: Floats | None = None
    acoustic_scale: float = 1.0

    def __call__(self, frames_TD: NDArray[Any], graph: Graph) -> Hypothesis:
        """The best path of one utterance through the graph of its sentence.

        Raises SpeechError if no complete path is found, for example if there are fewer frames than states.
        """
        scores = np.asarray(self.score(frames_TD), np.float32)
        for beam in _BEAMS:
            search = Search(beam, max_active=2**31 - 1)
            found = Decoder(graph, self.self_loops, Scales(acoustic=self.acoustic_scale), search)(scores)
            if found.complete and len(found.states_T):
                return found
        raise SpeechError(
            f"{len(scores)} frames are too few for the transcript, or the transcript is wrong; "
            "correct it, or leave the utterance out"
        )


@dataclass(frozen=True, eq=False)
class Alignments:
    """The state of every frame of each utterance, and the reason for each utterance that could not be aligned."""

    labels: dict[str, Ints]
    failed: dict[str, str] = field(default_factory=dict)
    cost: float = 0.0  # sum over the best paths of all aligned utterances


def aligned(
    aligner: Aligner, frames: Mapping[str, NDArray[Any]], transcripts: Transcripts, workers: int | None = None
) -> Alignments:
    """Align the utterances `frames` in parallel processes, which also compute the scores and build the graphs.

    Memory-mapped frames are not copied, so memory does not grow with their number.
    """
    jobs = {name: (frames_TD, transcripts.texts[name]) for name, frames_TD in frames.items()}
    found = in_processes(_align_share, jobs, workers, aligner, transcripts.lexicon, transcripts.tying)
    labels = {name: path.states_T for name, path in found.items() if isinstance(path, Hypothesis)}
    failed = {name: path for name, path in found.items() if isinstance(path, str)}
    return Alignments(labels, failed, sum(path.cost for path in found.values() if isinstance(path, Hypothesis)))


def _align_share(
    jobs: Mapping[str, tuple[NDArray[Any], str]], aligner: Aligner, lexicon: Lexicon, tying: Tying
) -> dict[str, Hypothesis | str]:
    transcripts = Transcripts({name: text for name, (_, text) in jobs.items()}, lexicon, tying)
    found: dict[str, Hypothesis | str] = {}
    for name, (frames_TD, _) in jobs.items():
        try:
            found[name] = aligner(frames_TD, transcripts.graph(name))
        except SpeechError as error:
            found[name] = str(error)
    return found
