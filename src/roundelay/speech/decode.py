"""From log likelihoods to words: beam search in a decoding graph, for many utterances in parallel.

The score of a path π through the graph for an utterance of T frames is

    acoustic·Σ_t log p(x_t|s_t) − lm·cost_LG(π) − penalty·words(π) + Σ_t log a(s_t → s_t+1)

with log p(x|s) = log p(s|x) − log p(s), up to a constant that all paths share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from roundelay.errors import SpeechError
from roundelay.speech.fst import Fst, kaldifst_library
from roundelay.speech.graph import Graph
from roundelay.speech.hmm import Floats
from roundelay.speech.libraries import library
from roundelay.speech.parallel import in_processes
from roundelay.speech.segments import Ints


def log_likelihoods(log_posteriors_TS: ArrayLike, log_priors_S: ArrayLike) -> Floats:
    """log p(x|s) = log p(s|x) − log p(s), without log p(x), which is the same for all paths."""
    return np.asarray(log_posteriors_TS, np.float32) - np.asarray(log_priors_S, np.float32)


@dataclass(frozen=True)
class Scales:
    """Weights of the parts of a path's score; `tuning.tuned` finds good ones."""

    acoustic: float = 0.2
    lm: float = 1.0
    insertion_penalty: float = 0.0


@dataclass(frozen=True)
class Search:
    """Width of the search: it keeps paths that cost at most `beam` more than the best, in at most `max_active` nodes."""

    beam: float = 20.0
    max_active: int = 7000


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """The best path: its words, the state of every frame, its cost, and whether it ends where a sentence may end.

    `confidences` has a number from 0 to 1 for each word, if they were computed.
    """

    words: tuple[str, ...]
    states_T: Ints
    cost: float
    complete: bool
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Decoder:
    """Beam search (kaldi-decoder's FasterDecoder) in one graph with given scales. Can be pickled to other processes."""

    graph: Graph
    self_loops: Floats | None = None
    scales: Scales = field(default_factory=Scales)
    search: Search = field(default_factory=Search)

    @cached_property
    def _fst(self) -> Fst:
        s = self.scales
        return self.graph.fst(self.self_loops, lm_scale=s.lm, insertion_penalty=s.insertion_penalty)

    def __getstate__(self) -> dict[str, Any]:
        # kaldifst's objects cannot be pickled.
        return {key: value for key, value in self.__dict__.items() if key != "_fst"}

    def __call__(self, log_likelihoods_TS: ArrayLike) -> Hypothesis:
        """The best path for one utterance."""
        kaldi_decoder = library("kaldi_decoder", "decoding")
        scores = self._checked(log_likelihoods_TS)
        if not len(scores):
            return Hypothesis((), np.zeros(0, dtype=np.int32), 0.0, complete=True)
        options = kaldi_decoder.FasterDecoderOptions(beam=self.search.beam, max_active=self.search.max_active)
        decoder = kaldi_decoder.FasterDecoder(self._fst, options)
        decoder.decode(kaldi_decoder.DecodableCtc(scores))
        found, path = decoder.get_best_path()
        if not found:
            return Hypothesis((), np.zeros(len(scores), dtype=np.int32), float("inf"), complete=False)
        return self._hypothesis(path, complete=decoder.reached_final())

    def _checked(self, log_likelihoods_TS: ArrayLike) -> Floats:
        given = np.asarray(log_likelihoods_TS, dtype=np.float32)
        if given.ndim != 2 or given.shape[1] != self.graph.num_states:
            raise SpeechError(f"log likelihoods must be frames × {self.graph.num_states} states, got {given.shape}")
        if np.isnan(given).any():
            raise SpeechError("log likelihoods contain NaN; check whether training diverged")
        return np.ascontiguousarray(given * np.float32(self.scales.acoustic))

    def _hypothesis(self, path: Fst, *, complete: bool) -> Hypothesis:
        _, states, words, weight = kaldifst_library().get_linear_symbol_sequence(path)
        spoken = tuple(self.graph.words[word - 1] for word in words)
        return Hypothesis(spoken, np.array(states, dtype=np.int32) - 1, weight.value1 + weight.value2, complete)


def decode_all(
    decoder: Decoder, log_likelihoods: Mapping[str, ArrayLike], workers: int | None = None
) -> dict[str, Hypothesis]:
    """Decode many utterances in parallel. `workers` is the number of processes, by default one per available processor."""
    found = decode_with_each([decoder], log_likelihoods, workers)
    return {name: hypothesis for name, (hypothesis,) in found.items()}


def decode_with_each(
    decoders: Sequence[Decoder], log_likelihoods: Mapping[str, ArrayLike], workers: int | None = None
) -> dict[str, list[Hypothesis]]:
    """Decode every utterance with every decoder, in parallel; utterances are sent to the processes only once."""
    arrays = {name: np.asarray(scores, dtype=np.float32) for name, scores in log_likelihoods.items()}
    return in_processes(_decode_share, arrays, workers, decoders)


def _decode_share(share: Mapping[str, Floats], decoders: Sequence[Decoder]) -> dict[str, list[Hypothesis]]:
    return {name: [decoder(scores) for decoder in decoders] for name, scores in share.items()}
