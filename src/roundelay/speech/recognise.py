"""From frames to words with the model of a finished run.

A run's folder `recogniser` has what the network alone does not know: states.json (the tying, priors and transitions),
lexicon.txt, lm.arpa, and scales.json, tuned on the validation split. So a run can be moved away from its corpus.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from roundelay.errors import ConfigError, DataError
from roundelay.speech.align import aligned, alignment_graphs
from roundelay.speech.corpus import Utterance
from roundelay.speech.decode import Decoder, Hypothesis, Scales, decode_all, log_likelihoods, tuned, word_times
from roundelay.speech.feature_set import features
from roundelay.speech.features import speaker_features
from roundelay.speech.graph import decoding_graph
from roundelay.speech.hmm import Floats, Tying, phone_segments
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.lm import NGram
from roundelay.speech.model import AcousticModel, log_posteriors
from roundelay.speech.prepare import Prepared, SpeechConfig, corpus_of, language_model, prepared
from roundelay.speech.segments import Segments
from roundelay.speech.tree import tying_from_json
from roundelay.training.run_result import FinishedRun

log = logging.getLogger("roundelay")

NUMBERS_AT_ONCE = 2**28  # frames × states whose likelihoods are in memory together: 1 GiB, and as much for copies

FOLDER = "recogniser"
STATES, LEXICON, ARPA, SCALES = "states.json", "lexicon.txt", "lm.arpa", "scales.json"


class Times(NamedTuple):
    """Phones and words of utterances with their times, and why some have none."""

    phones: dict[str, Segments]
    words: dict[str, Segments]
    failed: dict[str, str]


@dataclass(frozen=True, eq=False)
class Recogniser:
    """A network and everything that turns its output into words."""

    module: nn.Module
    config: SpeechConfig
    tying: Tying
    lexicon: Lexicon
    lm: NGram
    log_priors: Floats
    self_loops: Floats
    features: int  # of a frame
    scales: Scales = field(default_factory=Scales)

    @classmethod
    def of_run(cls, run: FinishedRun) -> Recogniser:
        """The recogniser of a finished run; what the run lacks is made from its corpus, and kept."""
        config = run.settings
        if not isinstance(config, SpeechConfig):
            raise ConfigError(f"'{run.folder}' is no run of speech recognition but of {run.task_class.__name__}")
        folder = run.folder / FOLDER
        if not (folder / STATES).is_file():
            leave(prepared(config), config, folder)
        states = json.loads((folder / STATES).read_text())
        tying = tying_from_json(states["tying"])
        priors, loops = (np.array(states[name], dtype=np.float32) for name in ("log_priors", "self_loops"))
        module = run.with_weights(AcousticModel(states["features"], tying.num_states, config.model))
        lexicon, lm = Lexicon.read(folder / LEXICON, tying.silence), NGram.read(folder / ARPA)
        return cls(module, config, tying, lexicon, lm, priors, loops, states["features"])._with_scales(folder)

    def _with_scales(self, folder: Path) -> Recogniser:
        """Those tuned before, or now on the validation split of the run's corpus, if it is here and has one."""
        if not (folder / SCALES).is_file():
            try:
                corpus = corpus_of(self.config)
            except DataError as error:
                log.warning("the scales have not been tuned yet, and cannot be: %s; taking the usual ones", error)
                return self
            if "valid" not in corpus.splits:
                return self
            log.info("tuning the scales on the validation split, once")
            chosen = corpus.split("valid")
            frames = features(corpus, self.config.features).of(chosen)
            decoder, trials = tuned(self._decoder, self._lots(frames), references(chosen))
            record = {"scales": asdict(decoder.scales), "trials": [asdict(trial) for trial in trials]}
            (folder / SCALES).write_text(json.dumps(record, indent=2))
        return replace(self, scales=Scales(**json.loads((folder / SCALES).read_text())["scales"]))

    def prepare(self) -> None:
        """Make the graph now, which takes a while, and not when it is first needed."""
        self._decoder  # noqa: B018  # a cached property

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(decoding_graph(self.lexicon, self.lm, self.tying), self.self_loops, self.scales)

    def log_likelihoods(self, frames: Mapping[str, NDArray[Any]]) -> dict[str, Floats]:
        """log p(x|s) of whole utterances, up to what all states share."""
        for name, frames_TF in frames.items():
            if frames_TF.shape[1] != self.features:
                raise DataError(
                    f"'{name}' has {frames_TF.shape[1]} features a frame, and the network was trained on {self.features}: with "
                    "features of Kaldi's, perhaps, which other audio does not bring along"
                )
        scores = log_posteriors(self.module, frames)
        return {name: log_likelihoods(scores_TS, self.log_priors) for name, scores_TS in scores.items()}

    def _lots(self, frames: Mapping[str, NDArray[Any]]) -> Iterable[Mapping[str, Floats]]:
        """The likelihoods of some utterances at a time, as many as memory has room for; may be gone through again."""
        lots = _lots_of(frames, NUMBERS_AT_ONCE // self.tying.num_states)
        if len(lots) == 1:
            return [self.log_likelihoods(lots[0])]
        return _Again(lambda: map(self.log_likelihoods, lots))

    def recognised(self, frames: Mapping[str, NDArray[Any]], workers: int | None = None) -> dict[str, Hypothesis]:
        """What was said in each utterance."""
        said: dict[str, Hypothesis] = {}
        for lot in self._lots(frames):
            said |= decode_all(self._decoder, lot, workers)
        return said

    def word_times(self, hypothesis: Hypothesis) -> Segments:
        """When each of its words was said."""
        return word_times(hypothesis, self.lexicon, self.tying)

    def times(self, frames: Mapping[str, NDArray[Any]], texts: Mapping[str, str]) -> Times:
        """When what is known to be said was said: the best path through the states of each text."""
        graphs, failed = alignment_graphs({name: texts[name] for name in frames}, self.lexicon, self.tying)
        phones: dict[str, Segments] = {}
        words: dict[str, Segments] = {}
        for lot in self._lots({name: frames[name] for name in graphs}):
            found = aligned(lot, {name: graphs[name] for name in lot}, self.self_loops, self.scales.acoustic)
            failed |= found.failed
            for name, states_T in found.labels.items():
                said = Hypothesis(tuple(texts[name].split()), states_T, 0.0, complete=True)
                phones[name], words[name] = phone_segments(states_T, self.tying), self.word_times(said)
        return Times(phones, words, failed)


class _Again:
    """What is made anew whenever it is gone through."""

    def __init__(self, make: Callable[[], Iterator[Mapping[str, Floats]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Mapping[str, Floats]]:
        return self._make()


def _lots_of(frames: Mapping[str, NDArray[Any]], most: int) -> list[dict[str, NDArray[Any]]]:
    """Utterances in their order, in lots of `most` frames at most, or of one utterance."""
    lots: list[dict[str, NDArray[Any]]] = []
    room = 0
    for name, frames_TF in frames.items():
        if len(frames_TF) > room:
            lots.append({})
            room = most
        lots[-1][name] = frames_TF
        room -= len(frames_TF)
    return lots


def leave(ready: Prepared, config: SpeechConfig, folder: Path) -> None:
    """Write what a recogniser needs beside the network; states.json comes last. Scales are tuned again for a new network."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCALES).unlink(missing_ok=True)
    ready.lexicon.write(folder / LEXICON)
    language_model(config.lm, ready.corpus, ready.lexicon).write(folder / ARPA)
    states = {
        "features": ready.features.dimension,
        "tying": ready.tying.to_json(),
        "log_priors": ready.log_priors.tolist(),
        "self_loops": ready.self_loops.tolist(),
    }
    (folder / STATES).write_text(json.dumps(states))


def references(utterances: Sequence[Utterance]) -> dict[str, str]:
    """What was said, by utterance."""
    return {utterance.id: utterance.text for utterance in utterances}


def transcribed(recogniser: Recogniser, files: Sequence[Path]) -> tuple[dict[Path, Hypothesis], list[str]]:
    """What was said in each audio file, normalised by itself; and a line for each that cannot be used."""
    frames: dict[str, NDArray[Any]] = {}
    problems: list[str] = []
    for path in files:
        utterance = Utterance(str(path), path, str(path), "", "test")
        found = speaker_features([utterance], recogniser.config.features)
        frames |= dict(zip(found.ids, cast("list[NDArray[Any]]", found.frames), strict=True))
        problems += [f"{kind}: {detail}" for kind, detail in found.problems if not found.ids]
    said = recogniser.recognised(frames) if frames else {}
    return {path: said[str(path)] for path in files if str(path) in said}, problems
