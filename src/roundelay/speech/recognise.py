"""From frames to words with the model of a finished run.

A run's folder `recogniser` has what the network alone does not know: states.json (the tying, priors and transitions),
lexicon.txt, lm.arpa, and scales.json, tuned on the validation split. So a run can be moved away from its corpus.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from roundelay.errors import ConfigError
from roundelay.speech.align import aligned, alignment_graphs
from roundelay.speech.corpus import Corpus, Utterance
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
from roundelay.training.finished import FinishedRun

log = logging.getLogger("roundelay")

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
        return cls(module, config, tying, lexicon, lm, priors, loops)._with_scales(folder)

    def _with_scales(self, folder: Path) -> Recogniser:
        """Those tuned before, or now on the validation split of the run's corpus, if it has one."""
        if not (folder / SCALES).is_file():
            corpus = corpus_of(self.config)
            if "valid" not in corpus.splits:
                return self
            log.info("tuning the scales on the validation split, once")
            chosen = corpus.split("valid")
            decoder, trials = tuned(
                self._decoder, self.log_likelihoods(frames_of(corpus, chosen, self.config)), references(chosen)
            )
            record = {"scales": asdict(decoder.scales), "trials": [asdict(trial) for trial in trials]}
            (folder / SCALES).write_text(json.dumps(record, indent=2))
        return replace(self, scales=Scales(**json.loads((folder / SCALES).read_text())["scales"]))

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(decoding_graph(self.lexicon, self.lm, self.tying), self.self_loops, self.scales)

    def log_likelihoods(self, frames: Mapping[str, NDArray[Any]]) -> dict[str, Floats]:
        """log p(x|s) of whole utterances, up to what all states share."""
        scores = log_posteriors(self.module, frames)
        return {name: log_likelihoods(scores_TS, self.log_priors) for name, scores_TS in scores.items()}

    def recognised(self, frames: Mapping[str, NDArray[Any]], workers: int | None = None) -> dict[str, Hypothesis]:
        """What was said in each utterance."""
        return decode_all(self._decoder, self.log_likelihoods(frames), workers)

    def word_times(self, hypothesis: Hypothesis) -> Segments:
        """When each of its words was said."""
        return word_times(hypothesis, self.lexicon, self.tying)

    def times(self, frames: Mapping[str, NDArray[Any]], texts: Mapping[str, str]) -> Times:
        """When what is known to be said was said: the best path through the states of each text."""
        graphs, failed = alignment_graphs({name: texts[name] for name in frames}, self.lexicon, self.tying)
        scores = self.log_likelihoods({name: frames[name] for name in graphs})
        found = aligned(scores, graphs, self.self_loops, self.scales.acoustic)
        phones = {name: phone_segments(states_T, self.tying) for name, states_T in found.labels.items()}
        words = {
            name: self.word_times(Hypothesis(tuple(texts[name].split()), states_T, 0.0, complete=True))
            for name, states_T in found.labels.items()
        }
        return Times(phones, words, failed | found.failed)


def leave(ready: Prepared, config: SpeechConfig, folder: Path) -> None:
    """Write what a recogniser needs beside the network; states.json comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    ready.lexicon.write(folder / LEXICON)
    language_model(config.lm, ready.corpus, ready.lexicon).write(folder / ARPA)
    states = {
        "features": ready.features.dimension,
        "tying": ready.tying.to_json(),
        "log_priors": ready.log_priors.tolist(),
        "self_loops": ready.self_loops.tolist(),
    }
    (folder / STATES).write_text(json.dumps(states))


def frames_of(corpus: Corpus, utterances: Sequence[Utterance], config: SpeechConfig) -> dict[str, NDArray[Any]]:
    """T×F of those utterances whose audio can be used."""
    found = features(corpus, config.features)
    return {utterance.id: found[utterance.id] for utterance in utterances if utterance.id in found}


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
