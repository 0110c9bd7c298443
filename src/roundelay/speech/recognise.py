"""Recognition and alignment with the model of a finished run.

The folder `recogniser` of a run has what is needed beside the network: states.json (tying, priors, transitions, how often each
pronunciation occurs), lexicon.txt,
lm.arpa, scales.json (the decoder's scales, tuned on the validation split) and, with adapted features, adaptation.npz.
So a run works without its corpus.
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
import torch
from numpy.typing import NDArray

from roundelay.errors import ConfigError, DataError
from roundelay.speech.adaptation import Adaptation, adapted_speakers
from roundelay.speech.align import Aligner, Transcripts, aligned
from roundelay.speech.audio import steady, utterance_audio
from roundelay.speech.confidence import with_confidences
from roundelay.speech.config import SpeechConfig
from roundelay.speech.corpus import Corpus, Utterance
from roundelay.speech.decode import Decoder, Hypothesis, Scales, decode_all, log_likelihoods
from roundelay.speech.feature_set import features
from roundelay.speech.features import speaker_features
from roundelay.speech.gaussians import FramesByUtterance
from roundelay.speech.graph import decoding_graph
from roundelay.speech.hmm import Floats, Tying, phone_segments
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.lm import NGram
from roundelay.speech.model import AcousticModel, Ensemble, acoustic_model, log_posteriors
from roundelay.speech.prepare import ADAPTATION, Prepared, corpus_of, language_model, prepared
from roundelay.speech.segments import Ints, Segments
from roundelay.speech.tree import tying_from_json
from roundelay.speech.tuning import tuned
from roundelay.speech.word_times import pronunciation_counts, word_times
from roundelay.training.run_result import RunResult

log = logging.getLogger("roundelay")

NUMBERS_AT_ONCE = 2**28  # frames × states of likelihoods in memory at a time: 1 GiB, and as much for copies

# Weight of the adapted Gaussians beside the network, chosen on speakers of AN4 that were held out (recipes/an4/RESULTS.md).
GAUSSIANS = 0.3
SILENT = "silent"  # the flaw of audio whose samples are all zero
NOTHING = Hypothesis((), np.zeros(0, np.int32), 0.0, complete=True)
PASSES = 2  # how often speech is decoded, with fMLLR
FOLDER = "recogniser"
STATES, LEXICON, ARPA, SCALES = "states.json", "lexicon.txt", "lm.arpa", "scales.json"


class Times(NamedTuple):
    """Phone and word times of utterances, and the reason for each utterance that could not be aligned."""

    phones: dict[str, Segments]
    words: dict[str, Segments]
    failed: dict[str, str]


@dataclass(frozen=True, eq=False)
class Recogniser:
    """A network, and everything that turns its output into words."""

    module: AcousticModel | Ensemble
    config: SpeechConfig
    tying: Tying
    lexicon: Lexicon
    lm: NGram
    log_priors: Floats
    self_loops: Floats
    features: int  # dimensions of a frame
    scales: Scales = field(default_factory=Scales)
    adaptation: Adaptation | None = None

    @classmethod
    def of_run(cls, run: RunResult) -> Recogniser:
        """The recogniser of a finished run. Missing files, such as scales.json, are made from the run's corpus and saved."""
        config = run.settings
        if not isinstance(config, SpeechConfig):
            raise ConfigError(f"'{run.folder}' is not a run of speech recognition, but of {run.task_class.__name__}")
        folder = run.folder / FOLDER
        if not (folder / STATES).is_file():
            save_recogniser(prepared(config), config, folder)
        states = json.loads((folder / STATES).read_text())
        tying = tying_from_json(states["tying"])
        priors, loops = (np.array(states[name], dtype=np.float32) for name in ("log_priors", "self_loops"))
        module = run.with_weights(acoustic_model(states["features"], tying.num_states, config.model))
        counts = {(word, tuple(phones)): count for word, phones, count in states.get("pronunciations", ())}
        lexicon = Lexicon.read(folder / LEXICON, tying.silence).with_counts(counts)
        lm = NGram.read(folder / ARPA)
        adaptation = Adaptation.load(folder / ADAPTATION) if (folder / ADAPTATION).is_file() else None
        recogniser = cls(module, config, tying, lexicon, lm, priors, loops, states["features"], adaptation=adaptation)
        return recogniser._with_scales(folder)

    def _with_scales(self, folder: Path) -> Recogniser:
        """A copy with tuned scales. They are tuned and saved if scales.json is missing and the corpus has a validation split."""
        if not (folder / SCALES).is_file():
            try:
                corpus = corpus_of(self.config)
            except DataError as error:
                log.warning("the scales of the decoder cannot be tuned: %s; using the default scales", error)
                return self
            if "valid" not in corpus.splits:
                return self
            log.info("tuning the scales on the validation split, once")
            chosen = corpus.split("valid")
            frames = self.frames(features(corpus, self.config.logmel), chosen)
            decoder, trials = tuned(self._decoder, self._batches(frames), references(chosen))
            record = {"scales": asdict(decoder.scales), "trials": [asdict(trial) for trial in trials]}
            (folder / SCALES).write_text(json.dumps(record, indent=2))
        return replace(self, scales=Scales(**json.loads((folder / SCALES).read_text())["scales"]))

    def prepare(self) -> None:
        """Make the decoding graph now, not when it is first needed. This takes some seconds with large models."""
        self._decoder  # noqa: B018  # a cached property

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(decoding_graph(self.lexicon, self.lm, self.tying), self.self_loops, self.scales)

    def log_likelihoods(self, frames: Mapping[str, NDArray[Any]]) -> dict[str, Floats]:
        """T×S log p(x|s) of whole utterances, up to a constant per frame that is the same for all states.

        With fMLLR, the log likelihoods of the adapted Gaussians are added with the weight GAUSSIANS. The Gaussians
        model the same states as the network, but make other errors.
        """
        for name, frames_TF in frames.items():
            if frames_TF.shape[1] != self.features:
                raise DataError(
                    f"'{name}' has {frames_TF.shape[1]} features a frame, and the network was trained on {self.features}; a "
                    "network trained on features of Kaldi needs such features for all audio"
                )
        scores = log_posteriors(self.module, frames)
        found = {name: log_likelihoods(scores_TS, self.log_priors) for name, scores_TS in scores.items()}
        if self.adaptation:
            for name in found:
                by_gaussians_TS = self.adaptation.log_likelihoods(frames[name])
                if by_gaussians_TS is not None:
                    found[name] += GAUSSIANS * by_gaussians_TS
        return found

    def _batches(self, frames: Mapping[str, NDArray[Any]]) -> Iterable[Mapping[str, Floats]]:
        """Likelihoods in batches of utterances that fit into memory. The result can be iterated several times."""
        batches = _batches_of(frames, NUMBERS_AT_ONCE // self.tying.num_states)
        if len(batches) == 1:
            return [self.log_likelihoods(batches[0])]
        return _Reiterable(lambda: map(self.log_likelihoods, batches))

    def frames(
        self, base: FramesByUtterance, utterances: Iterable[Utterance], states: Mapping[str, Ints] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Features as the network takes them, adapted to their speakers if the run was trained so.

        `base` holds log-mel features. Utterances that it lacks are left out. Without `states` a first pass finds them.
        """
        usable = [utterance for utterance in utterances if utterance.id in base]
        if self.adaptation is None:
            return {utterance.id: base[utterance.id] for utterance in usable}
        speakers = adapted_speakers(self.adaptation, base, usable, states or {}, self._decoder)
        return {name: frames for each in speakers for name, frames in zip(each.ids, each.frames, strict=True)}

    def recognised_in_passes(
        self, base: FramesByUtterance, utterances: Sequence[Utterance], passes: int
    ) -> list[dict[str, Hypothesis]]:
        """The hypotheses of each pass; those of the last pass are the result. Without fMLLR there is only one pass.

        A speaker's transform is estimated from the states of the speaker's frames. In the first pass Gaussians
        find these states. In every further pass, the states are those of the hypotheses of the pass before.
        """
        adapts = self.adaptation is not None and self.adaptation.model is not None
        found = [self.recognised(self.frames(base, utterances))]
        while len(found) < passes and adapts and found[0]:
            states = {name: hypothesis.states_T for name, hypothesis in found[-1].items()}
            found.append(self.recognised(self.frames(base, utterances, states)))
        return found

    def recognised(self, frames: Mapping[str, NDArray[Any]]) -> dict[str, Hypothesis]:
        found: dict[str, Hypothesis] = {}
        for batch in self._batches(frames):
            for name, hypothesis in decode_all(self._decoder, batch).items():
                joint_TS = torch.from_numpy(batch[name] + self.log_priors)
                log_posteriors_TS = joint_TS.log_softmax(1).numpy()
                found[name] = with_confidences(hypothesis, log_posteriors_TS, self.lexicon, self.tying)
        return found

    def word_times(self, hypothesis: Hypothesis) -> Segments:
        return word_times(hypothesis, self.lexicon, self.tying)

    def times(self, frames: Mapping[str, NDArray[Any]], texts: Mapping[str, str]) -> Times:
        """Phone and word times of known texts: the best path through the states of each text."""
        aligner = Aligner(np.asarray, self.self_loops, self.scales.acoustic)
        phones: dict[str, Segments] = {}
        words: dict[str, Segments] = {}
        failed: dict[str, str] = {}
        for batch in self._batches(frames):
            found = aligned(aligner, batch, Transcripts(texts, self.lexicon, self.tying))
            failed |= found.failed
            for name, states_T in found.labels.items():
                said = Hypothesis(tuple(texts[name].split()), states_T, 0.0, complete=True)
                phones[name], words[name] = phone_segments(states_T, self.tying), self.word_times(said)
        return Times(phones, words, failed)

    def aligned_corpus(self, corpus: Corpus) -> Times:
        """Phone and word times of a whole corpus. With fMLLR, unadapted Gaussians align first."""
        base, texts = features(corpus, self.config.logmel), references(corpus.utterances)
        states: dict[str, Ints] = {}
        if self.adaptation and self.adaptation.model:
            transcripts = Transcripts(texts, self.lexicon, self.tying)
            states = self.adaptation.gmm.aligned(base, transcripts, [name for name in texts if name in base]).labels
        return self.times(self.frames(base, corpus.utterances, states), texts)


class _Reiterable:
    """An iterable that makes a new iterator each time."""

    def __init__(self, make: Callable[[], Iterator[Mapping[str, Floats]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Mapping[str, Floats]]:
        return self._make()


def _batches_of(frames: Mapping[str, NDArray[Any]], max_frames: int) -> list[dict[str, NDArray[Any]]]:
    """Utterances in their order, in batches of at most `max_frames` frames, or of one utterance."""
    batches: list[dict[str, NDArray[Any]]] = []
    room = 0
    for name, frames_TF in frames.items():
        if len(frames_TF) > room:
            batches.append({})
            room = max_frames
        batches[-1][name] = frames_TF
        room -= len(frames_TF)
    return batches


def save_recogniser(ready: Prepared, config: SpeechConfig, folder: Path) -> None:
    """Write the files of the folder `recogniser`, states.json last.

    scales.json is deleted, since its scales were tuned for another network.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCALES).unlink(missing_ok=True)
    ready.lexicon.write(folder / LEXICON)
    language_model(config.lm, ready.corpus, ready.lexicon).write(folder / ARPA)
    if ready.adaptation:
        ready.adaptation.save(folder / ADAPTATION)
    original = {each.id: each.text for each in ready.corpus.split("train") if each.speed == 1.0}
    labels = {name: states_T for name, states_T in ready.training_labels().items() if name in original}
    counts = pronunciation_counts(labels, original, ready.lexicon, ready.tying)
    states = {
        "pronunciations": [[word, phones, count] for (word, phones), count in counts.items()],
        "features": ready.features.dimension,
        "tying": ready.tying.to_json(),
        "log_priors": ready.log_priors.tolist(),
        "self_loops": ready.self_loops.tolist(),
    }
    (folder / STATES).write_text(json.dumps(states))


def references(utterances: Sequence[Utterance]) -> dict[str, str]:
    """The text of each utterance."""
    return {utterance.id: utterance.text for utterance in utterances}


def transcribed(
    recogniser: Recogniser, files: Sequence[Path], passes: int, *, one_speaker: bool = False
) -> tuple[dict[Path, Hypothesis], list[str]]:
    """The hypothesis of each audio file, and a line for each problem. Every file is its own speaker, unless `one_speaker`.

    Digital silence has no words: it is not decoded. Words in steady noise have no confidence.
    """
    speaker = "speaker" if one_speaker else None
    utterances = [Utterance(str(path), path, speaker or str(path), "", "test") for path in dict.fromkeys(files)]
    base: dict[str, NDArray[Any]] = {}
    problems: list[str] = []
    silent: set[str] = set()
    for group in [utterances] if one_speaker else [[utterance] for utterance in utterances]:
        found = speaker_features(group, recogniser.config.logmel)
        base |= dict(zip(found.ids, cast("list[NDArray[Any]]", found.frames), strict=True))
        problems += [f"{kind}: {detail}" for kind, detail in found.problems]
        silent |= {detail for kind, detail in found.problems if kind == SILENT}
    heard = [utterance for utterance in utterances if utterance.id not in silent]
    hypotheses = recogniser.recognised_in_passes(base, heard, passes)[-1] if base else {}
    for name in [each.id for each in heard if each.id in hypotheses and steady(utterance_audio(each))]:
        problems.append(f"no speech: {name} has a steady loudness, as noise has; its words have no confidence")
        hypotheses[name] = replace(hypotheses[name], confidences=(0.0,) * len(hypotheses[name].words))
    hypotheses |= dict.fromkeys(silent, NOTHING)
    return {path: hypotheses[str(path)] for path in dict.fromkeys(files) if str(path) in hypotheses}, problems
