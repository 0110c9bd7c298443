"""From log likelihoods to words: beam search in a decoding graph, many utterances at once, with times.

The score of a path π through the graph for an utterance of T frames is

    acoustic·Σ_t log p(x_t|s_t) − lm·cost_LG(π) − penalty·words(π) + Σ_t log a(s_t → s_t+1)

with log p(x|s) = log p(s|x) − prior·log p(s), up to what all paths share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from roundelay.errors import MissingExtraError, SpeechError
from roundelay.speech.fst import Fst
from roundelay.speech.graph import Graph
from roundelay.speech.hmm import Floats, Tying, phone_segments
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.score import score
from roundelay.speech.segments import Ints, Segments, segments

Job = TypeVar("Job")
Result = TypeVar("Result")


def log_likelihoods(log_posteriors_TS: ArrayLike, log_priors_S: ArrayLike, prior_scale: float = 1.0) -> Floats:
    """log p(x|s) = log p(s|x) − prior_scale·log p(s), up to log p(x), which all paths share."""
    return np.asarray(log_posteriors_TS, dtype=np.float32) - np.float32(prior_scale) * np.asarray(
        log_priors_S, np.float32
    )


@dataclass(frozen=True)
class Scales:
    """How much the parts of a path's score weigh; `tuned` finds them."""

    acoustic: float = 0.2
    lm: float = 1.0
    insertion_penalty: float = 0.0


@dataclass(frozen=True)
class Search:
    """How wide to search: costs beyond the best that are kept (in scaled units), and how many nodes at most."""

    beam: float = 16.0
    max_active: int = 7000


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """What was recognised: words, the state of every frame, the path's cost, and whether it ends where a sentence may end."""

    words: tuple[str, ...]
    states_T: Ints
    cost: float
    complete: bool


@dataclass(frozen=True, eq=False)
class Decoder:
    """Beam search (kaldi-decoder's FasterDecoder) in one graph with given scales; a value, so processes can have copies."""

    graph: Graph
    self_loops: Floats | None = None
    scales: Scales = field(default_factory=Scales)
    search: Search = field(default_factory=Search)

    @cached_property
    def _fst(self) -> Fst:
        s = self.scales
        return self.graph.fst(self.self_loops, lm_scale=s.lm, insertion_penalty=s.insertion_penalty)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_fst"}  # kaldifst's objects do not pickle

    def __call__(self, log_likelihoods_TS: ArrayLike) -> Hypothesis:
        """The best path for one utterance."""
        try:
            import kaldi_decoder
        except ImportError as error:
            raise MissingExtraError("decoding", "speech") from error
        scores = self._checked(log_likelihoods_TS)
        if not len(scores):
            return Hypothesis((), np.zeros(0, dtype=np.int32), 0.0, complete=True)
        options = kaldi_decoder.FasterDecoderOptions(beam=self.search.beam, max_active=self.search.max_active)
        decoder = kaldi_decoder.FasterDecoder(self._fst, options)
        decoder.decode(kaldi_decoder.DecodableCtc(scores))
        found, path = decoder.get_best_path()
        return self._hypothesis(path, complete=decoder.reached_final()) if found else self._nothing(len(scores))

    def _checked(self, log_likelihoods_TS: ArrayLike) -> Floats:
        given = np.asarray(log_likelihoods_TS, dtype=np.float32)
        if given.ndim != 2 or given.shape[1] != self.graph.num_states:
            raise SpeechError(f"log likelihoods must be frames × {self.graph.num_states} states, got {given.shape}")
        if np.isnan(given).any():
            raise SpeechError("log likelihoods contain NaN; did training diverge?")
        return np.ascontiguousarray(given * np.float32(self.scales.acoustic))

    def _hypothesis(self, path: Fst, *, complete: bool) -> Hypothesis:
        import kaldifst

        _, states, words, weight = kaldifst.get_linear_symbol_sequence(path)
        spoken = tuple(self.graph.words[word - 1] for word in words)
        return Hypothesis(spoken, np.array(states, dtype=np.int32) - 1, weight.value1 + weight.value2, complete)

    def _nothing(self, num_frames: int) -> Hypothesis:
        return Hypothesis((), np.zeros(num_frames, dtype=np.int32), float("inf"), complete=False)


def decode_all(
    decoder: Decoder, log_likelihoods: Mapping[str, ArrayLike], workers: int | None = None
) -> dict[str, Hypothesis]:
    """Decode many utterances in parallel processes; kaldi-decoder holds Python's lock, so threads would not help.

    `workers` defaults to the processors that this process may use.
    """
    found = in_processes(_decode_share, _as_arrays(log_likelihoods), workers, [decoder])
    return {name: hypothesis for name, (hypothesis,) in found.items()}


def _as_arrays(log_likelihoods: Mapping[str, ArrayLike]) -> dict[str, Floats]:
    return {name: np.asarray(scores, dtype=np.float32) for name, scores in log_likelihoods.items()}


def _decode_share(share: Mapping[str, Floats], decoders: Sequence[Decoder]) -> dict[str, list[Hypothesis]]:
    return {name: [decoder(scores) for decoder in decoders] for name, scores in share.items()}


def in_processes(
    function: Callable[..., dict[str, Result]], jobs: Mapping[str, Job], workers: int | None, *arguments: object
) -> dict[str, Result]:
    """function(share, *arguments) on equal shares of the jobs, each in a process; results in the order of the jobs."""
    workers = max(1, min(workers or len(os.sched_getaffinity(0)), len(jobs)))
    if workers == 1:
        return function(jobs, *arguments)
    import joblib  # type: ignore[import-untyped]

    names = list(jobs)
    shares = [{name: jobs[name] for name in names[i::workers]} for i in range(workers)]
    found = joblib.Parallel(n_jobs=workers)(joblib.delayed(function)(share, *arguments) for share in shares)
    merged = {name: result for part in found for name, result in part.items()}
    return {name: merged[name] for name in jobs}


def word_times(hypothesis: Hypothesis, lexicon: Lexicon, tying: Tying) -> Segments:
    """When each word was said, from the path's states: its phones are matched with the words' pronunciations.

    (The graph alone cannot tell: determinisation moves words along their phones.) If the search broke off in the middle of a
    word, what cannot be matched stands at the end with no duration.
    """
    phones = phone_segments(hypothesis.states_T, tying)
    spans = _spans(hypothesis.words, phones.symbols, _as_heard(hypothesis.words, lexicon, tying), lexicon.silence)
    begins = (*map(float, phones.starts_s), float(phones.end_s))
    times = [(begins[i], begins[j]) for i, j in spans]
    times += [(phones.end_s, phones.end_s)] * (len(hypothesis.words) - len(times))
    return segments((word, i, round(j - i, 6)) for word, (i, j) in zip(hypothesis.words, times, strict=True))


def _as_heard(words: Sequence[str], lexicon: Lexicon, tying: Tying) -> dict[str, list[tuple[str, ...]]]:
    """Pronunciations in the phones that states are known by: where variants of a phone share states, the first of them."""
    heard: dict[str, str] = {}
    for phone in {phone for word in words for pronunciation in lexicon[word] for phone in pronunciation}:
        state = tying.chains(0, tying.number(phone), 0)[0]
        heard[phone] = tying.phones[tying.phone_of_state[state]]
    return {word: [tuple(heard[phone] for phone in each) for each in lexicon[word]] for word in words}


def _spans(
    words: Sequence[str], phones: Sequence[str], lexicon: Mapping[str, Sequence[tuple[str, ...]]], silence: str
) -> list[tuple[int, int]]:
    """Which phones each word has: places (i, j) with phones[i:j] one of its pronunciations, and only silence between."""
    reached: list[dict[int, int]] = [{0: 0}]  # for each word said so far: where it may end, and where it then begins
    for word in words:
        ends: dict[int, int] = {}
        for before in reached[-1]:
            for i in _after_silence(before, phones, silence):
                ends.update({i + len(p): i for p in lexicon[word] if tuple(phones[i : i + len(p)]) == p})
        if not ends:
            break
        reached.append(ends)
    spans: list[tuple[int, int]] = []
    end = max(reached[-1])
    for k in range(len(reached) - 1, 0, -1):
        begin = reached[k][end]
        spans.append((begin, end))
        end = begin if begin in reached[k - 1] else begin - 1
    return spans[::-1]


def _after_silence(place: int, phones: Sequence[str], silence: str) -> tuple[int, ...]:
    return (place, place + 1) if place < len(phones) and phones[place] == silence else (place,)


@dataclass(frozen=True)
class Trial:
    """One setting of the scales and its errors on the validation set."""

    scales: Scales
    wer: float


ACOUSTIC_SCALES = (0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1)
INSERTION_PENALTIES = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)


def tuned(
    decoder: Decoder,
    lots: Iterable[Mapping[str, ArrayLike]],
    references: Mapping[str, str],
    workers: int | None = None,
) -> tuple[Decoder, list[Trial]]:
    """The decoder with the fewest errors on a validation set, over acoustic scales and then insertion penalties; and all trials.

    `lots` are log likelihoods of some utterances at a time; they are gone through twice. The language model's scale stays, for
    what is tuned is its ratio to the acoustic scale; transitions, which neither scales, weigh little. Among equals the middle
    one is taken, where the plateau is safest.
    """
    scales = [replace(decoder.scales, acoustic=acoustic) for acoustic in ACOUSTIC_SCALES]
    first = _trials(decoder, scales, lots, references, workers)
    scales = [replace(_best(first), insertion_penalty=penalty) for penalty in INSERTION_PENALTIES]
    second = _trials(decoder, scales, lots, references, workers)
    return replace(decoder, scales=_best(second)), first + second


def _trials(
    decoder: Decoder,
    settings: Sequence[Scales],
    lots: Iterable[Mapping[str, ArrayLike]],
    references: Mapping[str, str],
    workers: int | None,
) -> list[Trial]:
    decoders = [replace(decoder, scales=scales) for scales in settings]
    found: dict[str, list[Hypothesis]] = {}
    for lot in lots:  # all scales at once, so that utterances travel to the processes once
        found |= in_processes(_decode_share, _as_arrays(lot), workers, decoders)
    wers = [
        score(references, {name: hypotheses[i].words for name, hypotheses in found.items()}).wer
        for i in range(len(settings))
    ]
    return [Trial(scales, wer) for scales, wer in zip(settings, wers, strict=True)]


def _best(trials: Sequence[Trial]) -> Scales:
    least = min(trial.wer for trial in trials)
    equals = [trial for trial in trials if trial.wer == least]
    return equals[len(equals) // 2].scales
