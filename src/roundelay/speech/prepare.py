"""From a corpus to training data: features, states, and the state of every frame. Computed once, then cached on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from roundelay.errors import ConfigError, DataError
from roundelay.speech.adaptation import FMLLR, LOGMEL, Adaptation, Training, adapted_speakers
from roundelay.speech.cache import cache_folder, fingerprint, locked, state_of
from roundelay.speech.config import NAMED_LABELS, PDFS, LmConfig, SpeechConfig
from roundelay.speech.corpora.catalogue import corpus
from roundelay.speech.corpus import Corpus, Problems
from roundelay.speech.decode import Decoder
from roundelay.speech.feature_set import FeatureSet, features, features_key, write_features
from roundelay.speech.graph import decoding_graph
from roundelay.speech.hmm import Floats, Tying, log_priors, self_loops
from roundelay.speech.labels import Labeller
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.lm import NGram
from roundelay.speech.lm_estimation import ngram
from roundelay.speech.segments import Ints, read_ctm
from roundelay.speech.tree import tying_from_json

VERSION = 5  # part of the cache's key: raise it when the labels change, so that old caches are not used
ADAPTATION_VERSION = 1  # the same for adapted features
ADAPTATION = "adaptation.npz"
UNLABELLED = -1  # the label of a frame whose state is not known


@dataclass(frozen=True, eq=False)
class Prepared:
    """A corpus, ready to train on and to decode.

    Attributes:
        labels_N: the state of each row of `features.frames_NF`, or UNLABELLED.
        log_priors, self_loops: of the states, estimated on the training split.
        adaptation: what made adapted features; None for log-mel features alone.
    """

    corpus: Corpus
    features: FeatureSet
    lexicon: Lexicon
    tying: Tying
    labels_N: Ints
    log_priors: Floats
    self_loops: Floats
    adaptation: Adaptation | None = None

    @cached_property
    def problems(self) -> Problems:
        """Problems of the corpus, words outside the lexicon, and training utterances without labels; without copies."""
        known = set(self.corpus.problems.cases)
        found = self.features.problems_with(self.corpus)
        for utterance in self.corpus.utterances:
            if utterance.id not in self.features or utterance.speed != 1.0:
                continue
            if unknown_words := self.lexicon.unknown([utterance.text]):
                where = "" if utterance.split == "train" else f" ({utterance.split})"
                found.add(f"words outside the lexicon{where}", f"{utterance.id}: {' '.join(unknown_words)}")
            unlabelled = self.labels_N[self.features.rows(utterance.id)[0]] == UNLABELLED
            if utterance.split == "train" and unlabelled and ("not aligned", utterance.id) not in known:
                found.add("no labels", utterance.id)
        return found

    @property
    def speakers(self) -> dict[str, str]:
        """The speaker of each utterance."""
        return {utterance.id: utterance.speaker for utterance in self.corpus.utterances}

    def training_labels(self) -> dict[str, Ints]:
        """The states of each utterance of the training split that has labels."""
        rows = {u.id: self.features.rows(u.id) for u in self.corpus.split("train") if u.id in self.features}
        labels = {name: self.labels_N[first:last] for name, (first, last) in rows.items()}
        return {name: labels_T for name, labels_T in labels.items() if labels_T[0] != UNLABELLED}

    def spans(self, split: str) -> list[tuple[int, int]]:
        """First row and last row + 1 of each utterance of a split that has labels."""
        if split not in self.corpus.splits:
            return []
        found = [self.features.rows(u.id) for u in self.corpus.split(split) if u.id in self.features]
        return [(first, last) for first, last in found if self.labels_N[first] != UNLABELLED]


def prepared(config: SpeechConfig) -> Prepared:
    """Training data from the cache, or computed now. Processes that call this at the same time wait for the first."""
    speech = _with_times(config)
    lexicon = lexicon_of(speech)
    feature_set = features(speech, config.logmel)
    folder = cache_folder("labels") / f"{speech.name}-{_key(config, speech, lexicon)}"
    with locked(folder.with_suffix(".lock")):
        if not (folder / "states.json").is_file():
            folder.mkdir(exist_ok=True)
            _write(folder, Labeller(config, speech, lexicon, feature_set))
    states = json.loads((folder / "states.json").read_text())
    priors, loops = (np.array(states[name], dtype=np.float32) for name in ("log_priors", "self_loops"))
    labels_N: Ints = np.load(folder / "labels.npy", mmap_mode="r")
    tying = tying_from_json(states["tying"])
    missing = sorted(set(lexicon.phones).difference(tying.phones))
    if speech.lexicon and missing:
        raise DataError(
            f"the lexicon {speech.lexicon} has phones that the tree of states lacks: {' '.join(missing)}; "
            "use the lexicon of the model that made the tree"
        )
    ready = Prepared(speech, feature_set, lexicon, tying, labels_N, priors, loops)
    return ready if config.features == (LOGMEL,) else _adapted(ready, config, folder.name)


def _adapted(ready: Prepared, config: SpeechConfig, labels_key: str) -> Prepared:
    """A copy of `ready` whose features are adapted to their speakers.

    The states that this needs are the labels for training utterances. For others, a first pass of decoding finds them.
    """
    if ready.corpus.appended:
        raise ConfigError(
            f"settings.features must be ['{LOGMEL}'], since {ready.corpus.name} brings its own fMLLR features or i-vectors"
        )
    lm = language_model(config.lm, ready.corpus, ready.lexicon)
    key = fingerprint(ADAPTATION_VERSION, labels_key, config.features, config.ivector, config.lm, lm.grams)
    folder = cache_folder("features") / f"{ready.corpus.name}-{key}"
    with locked(folder.with_suffix(".lock")):
        if not (folder / "index.json").is_file():
            folder.mkdir(exist_ok=True)
            labels = ready.training_labels()
            training = Training(ready.features, labels, ready.speakers, ready.tying)
            adaptation = Adaptation.fit(config.features, training, config.ivector)
            adaptation.save(folder / ADAPTATION)
            decoder = Decoder(decoding_graph(ready.lexicon, lm, ready.tying)) if FMLLR in config.features else None
            usable = [utterance for utterance in ready.corpus.utterances if utterance.id in ready.features]
            speakers = adapted_speakers(adaptation, ready.features, usable, labels, decoder)
            write_features(folder, ready.corpus.name, speakers)
    adapted = FeatureSet(folder)
    assert list(adapted) == list(ready.features), "rows of labels must be rows of adapted features"
    adapted.problems, adapted.audio_s = ready.features.problems, ready.features.audio_s
    return replace(ready, features=adapted, adaptation=Adaptation.load(folder / ADAPTATION))


def corpus_of(config: SpeechConfig) -> Corpus:
    """The corpus that a configuration names, with copies at other speeds if the configuration asks for them."""
    return _with_copies(_loaded(config), config)


def _with_times(config: SpeechConfig) -> Corpus:
    """Like `corpus_of`, but if `config.labels` is a folder, all phone times come from this folder.

    This includes the times of copies at other speeds.
    """
    found = _loaded(config)
    if found.frames and config.augment.bins:
        raise ConfigError(
            f"settings.augment.bins hides bins of our own mel filters, but the features of {found.name} are Kaldi's; set it to 0"
        )
    if config.labels not in NAMED_LABELS:
        found = found.realigned(read_ctm(Path(config.labels) / "phones.ctm"))
    return _with_copies(found, config)


def _loaded(config: SpeechConfig) -> Corpus:
    if config.corpus == "synth" and not config.data:
        from roundelay.speech.synth.generate import synth
        from roundelay.speech.synth.shard import SynthConfig

        return synth(SynthConfig(hours=config.hours))
    return corpus(config.corpus, config.data_path, allow_pipes=config.allow_pipes)


def _with_copies(found: Corpus, config: SpeechConfig) -> Corpus:
    if not config.augment.speeds:
        return found
    if found.frames or found.appended or config.labels == PDFS:
        raise ConfigError(
            f"settings.augment.speeds needs our own features and labels, but those of {found.name} are Kaldi's, "
            "made at one speed; leave speeds empty, or make the copies in Kaldi"
        )
    return found.speed_perturbed(config.augment.speeds)


def lexicon_of(speech: Corpus) -> Lexicon:
    """The lexicon of the corpus. Without one, each word of the training split is pronounced as its letters."""
    if speech.lexicon:
        return Lexicon.read(speech.lexicon)
    return Lexicon({word: [tuple(word)] for utterance in speech.split("train") for word in utterance.text.split()})


def language_model(config: LmConfig, speech: Corpus, lexicon: Lexicon) -> NGram:
    """The model of the ARPA file, or one estimated from the training transcripts without unknown words."""
    if config.arpa:
        return NGram.read(config.arpa)
    texts = [utterance.text for utterance in speech.split("train") if utterance.speed == 1.0]
    return ngram((text for text in texts if not lexicon.unknown([text])), config.order, lexicon.words, config.smoothing)


def _key(config: SpeechConfig, speech: Corpus, lexicon: Lexicon) -> str:
    """A string that changes with everything that the labels depend on."""
    said = [(utterance.id, utterance.text, utterance.split, utterance.phones) for utterance in speech.utterances]
    words = [(entry.word, entry.phones) for entry in lexicon.entries()]
    pdfs: tuple[object, ...] = ()
    if config.labels == PDFS and speech.pdfs and speech.tree:
        pdfs = speech.pdfs.fingerprint(), state_of(speech.tree), state_of(speech.tree.with_name("phones.txt"))
    made_of = (config.labels, config.states, pdfs, said, words)
    return fingerprint(VERSION, features_key(speech, config.logmel), *made_of)


def _write(folder: Path, labeller: Labeller) -> None:
    """Write labels.npy and then states.json, whose presence means that both are complete."""
    tying, labels = labeller.state_labels()
    train = labeller.training_labels(labels)
    labels_N = np.full(len(labeller.features.frames_NF), UNLABELLED, dtype=np.int32)
    for name, labels_T in labels.items():
        first, last = labeller.features.rows(name)
        labels_N[first:last] = labels_T
    np.save(folder / "labels.npy", labels_N)
    states = {
        "tying": tying.to_json(),
        "log_priors": log_priors(train, tying.num_states).tolist(),
        "self_loops": self_loops(train, tying.num_states).tolist(),
    }
    fresh = folder / "states.json.new"
    fresh.write_text(json.dumps(states))
    fresh.rename(folder / "states.json")
