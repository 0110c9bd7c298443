"""From a corpus to what a network trains on: features, states, and the state of every frame. Done once, then cached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from roundelay.errors import ConfigError, DataError, unknown
from roundelay.speech.augment import AugmentConfig
from roundelay.speech.cache import cache_folder, find_corpus, fingerprint, locked, state_of
from roundelay.speech.corpora.catalogue import FOUND, GIVEN, NAMES, corpus
from roundelay.speech.corpus import Corpus, Problems, Utterance
from roundelay.speech.feature_set import FeatureSet, features, features_key
from roundelay.speech.features import FeatureConfig
from roundelay.speech.flat_start import Spoken, aligned_alike, flat_start
from roundelay.speech.gaussians import Statistics, discriminant_axes, scatter
from roundelay.speech.hmm import Floats, Monophones, Tying, frame_labels, log_priors, self_loops
from roundelay.speech.kaldi_tree import KaldiTree, read_tree
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.lm import NGram, ngram
from roundelay.speech.model import ModelConfig
from roundelay.speech.segments import Ints, read_ctm
from roundelay.speech.tree import ContextStatistics, decision_tree, relabelled, tying_from_json
from roundelay.training.config import TaskConfig, at_least

VERSION = 5  # of what is computed here; changed with it, so that old caches are not taken for new ones
UNLABELLED = -1  # the state of frames of which nobody knows it
TREE_DIMENSIONS = 40  # discriminant directions in which the tree sees features
GIVEN_TIMES, FLAT_START, PDFS = "given", "flat-start", "pdfs"


@dataclass(frozen=True)
class LmConfig:
    """The language model.

    Attributes:
        arpa: a file with one; empty: count the transcripts of the training split.
        order: words in the longest grams that are counted.
        smoothing: of the counts.
    """

    arpa: str = ""
    order: int = at_least(1, 2)
    smoothing: Literal["witten-bell", "kneser-ney"] = "witten-bell"


@dataclass(frozen=True)
class SpeechConfig(TaskConfig):
    """Settings of speech recognition.

    Attributes:
        corpus: synth, an4, fsdd, switchboard, manifest or kaldi.
        data: its folder or archive; empty: where it is usually found (ROUNDELAY_DATA; the cache for synth).
        hours: of synth, when it is made.
        labels: given: from the corpus's phone times; flat-start: from transcripts alone; pdfs: Kaldi's alignments, in the
            states of its tree; or a folder with phones.ctm, such as `roundelay align` writes.
        states: of the HMM; 0: three for each phone, or those of Kaldi's tree; else tied triphones, so many at most.
        window: frames of a training sample; 21 in the papers; 0: whole utterances.
        allow_pipes: run the commands in Kaldi's wav.scp; only if you trust them.
    """

    corpus: str = "synth"
    data: str = ""
    hours: float = at_least(0.0, 0.5)
    labels: str = GIVEN_TIMES
    states: int = at_least(0, 0)
    window: int = at_least(0, 21)
    allow_pipes: bool = False
    features: FeatureConfig = field(default_factory=FeatureConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    lm: LmConfig = field(default_factory=LmConfig)


def check(config: SpeechConfig) -> None:
    """Raise ConfigError for settings that cannot work, as far as that can be told without reading the corpus."""
    if config.corpus not in NAMES:
        raise ConfigError(unknown("corpus", config.corpus, NAMES))
    if config.corpus in GIVEN and not config.data:
        raise ConfigError(f"settings.data is empty; a {config.corpus} corpus needs its folder (--data DIR)")
    if config.data and not Path(config.data).exists():
        raise ConfigError(f"settings.data: there is no '{config.data}'")
    if config.corpus in FOUND:
        try:
            find_corpus(config.corpus, _data(config))
        except DataError as error:
            raise ConfigError(f"settings.data: {error}") from None
    named = (GIVEN_TIMES, FLAT_START, PDFS)
    if config.labels not in named and not (Path(config.labels) / "phones.ctm").is_file():
        raise ConfigError(
            f"settings.labels must be {', '.join(named)} or a folder with phones.ctm, got '{config.labels}'"
        )
    if config.labels == PDFS and config.states:
        raise ConfigError(f"settings.states must be 0 where Kaldi's tree gives the states, got {config.states}")
    if any(speed <= 0 for speed in config.augment.speeds):
        raise ConfigError(f"settings.augment.speeds must be above 0, got {list(config.augment.speeds)}")
    if config.lm.arpa and not Path(config.lm.arpa).is_file():
        raise ConfigError(f"settings.lm.arpa: there is no file '{config.lm.arpa}'")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A corpus, ready to train on and to decode.

    Attributes:
        labels_N: the state of each row of `features.frames_NF`, or UNLABELLED.
        log_priors, self_loops: of the states, over the training split.
    """

    corpus: Corpus
    features: FeatureSet
    lexicon: Lexicon
    tying: Tying
    labels_N: Ints
    log_priors: Floats
    self_loops: Floats

    @cached_property
    def problems(self) -> Problems:
        """What is wrong with the corpus, and which training utterances are of no use; copies at other speeds do not count."""
        known = set(self.corpus.problems.cases)
        found = self.features.problems_with(self.corpus)
        for utterance in self.corpus.split("train"):
            if utterance.id in self.features and utterance.speed == 1.0:
                if unknown_words := self.lexicon.unknown([utterance.text]):
                    found.add("words outside the lexicon", f"{utterance.id}: {' '.join(unknown_words)}")
                unlabelled = self.labels_N[self.features.rows(utterance.id)[0]] == UNLABELLED
                if unlabelled and ("not aligned", utterance.id) not in known:
                    found.add("no labels", utterance.id)
        return found

    def spans(self, split: str) -> list[tuple[int, int]]:
        """Rows of the utterances of a split whose states are known."""
        if split not in self.corpus.splits:
            return []
        found = [self.features.rows(u.id) for u in self.corpus.split(split) if u.id in self.features]
        return [(first, last) for first, last in found if self.labels_N[first] != UNLABELLED]


def prepared(config: SpeechConfig) -> Prepared:
    """What there is in the cache, or is made now; learners that come meanwhile wait for the first."""
    speech = _with_times(config)
    lexicon = lexicon_of(speech)
    feature_set = features(speech, config.features)
    folder = cache_folder("labels") / f"{speech.name}-{_key(config, speech, lexicon)}"
    with locked(folder.with_suffix(".lock")):
        if not (folder / "states.json").is_file():
            folder.mkdir(exist_ok=True)
            _write(folder, *_States(config, speech, lexicon, feature_set).found())
    states = json.loads((folder / "states.json").read_text())
    priors, loops = (np.array(states[name], dtype=np.float32) for name in ("log_priors", "self_loops"))
    labels_N: Ints = np.load(folder / "labels.npy", mmap_mode="r")
    tying = tying_from_json(states["tying"])
    strange = sorted(set(lexicon.phones).difference(tying.phones))
    if speech.lexicon and strange:
        raise DataError(f"the lexicon {speech.lexicon} has phones that the tree of states lacks: {' '.join(strange)}")
    return Prepared(speech, feature_set, lexicon, tying, labels_N, priors, loops)


def corpus_of(config: SpeechConfig) -> Corpus:
    """The corpus that a configuration names, with copies at other speeds if it wants them."""
    return _with_copies(_found(config), config)


def _with_times(config: SpeechConfig) -> Corpus:
    """The same with the phone times of `config.labels`, which the copies have too; utterances without them lose theirs."""
    found = _found(config)
    if found.frames and config.augment.bins:
        raise ConfigError(
            f"settings.augment.bins hides bins of our own mel bank, but the features of {found.name} are Kaldi's; set it to 0"
        )
    if config.labels not in (GIVEN_TIMES, FLAT_START, PDFS):
        found = found.realigned(read_ctm(Path(config.labels) / "phones.ctm"))
    return _with_copies(found, config)


def _found(config: SpeechConfig) -> Corpus:
    if config.corpus == "synth" and not config.data:
        from roundelay.speech.synth.generate import synth
        from roundelay.speech.synth.shard import SynthConfig

        return synth(SynthConfig(hours=config.hours))
    return corpus(config.corpus, _data(config), allow_pipes=config.allow_pipes)


def _with_copies(found: Corpus, config: SpeechConfig) -> Corpus:
    if not config.augment.speeds:
        return found
    if found.frames or found.appended or config.labels == PDFS:
        raise ConfigError(
            f"settings.augment.speeds needs features and labels of our own, but those of {found.name} are Kaldi's, "
            "of one speed; leave speeds empty, or make the copies in Kaldi"
        )
    return found.speed_perturbed(config.augment.speeds)


def _data(config: SpeechConfig) -> Path | None:
    return Path(config.data) if config.data else None


def lexicon_of(speech: Corpus) -> Lexicon:
    """The corpus's lexicon; without one, the words of the training split, pronounced letter by letter."""
    if speech.lexicon:
        return Lexicon.read(speech.lexicon)
    return Lexicon({word: [tuple(word)] for utterance in speech.split("train") for word in utterance.text.split()})


def language_model(config: LmConfig, speech: Corpus, lexicon: Lexicon) -> NGram:
    """The user's, or one of the training transcripts whose words are all in the lexicon."""
    if config.arpa:
        return NGram.read(config.arpa)
    texts = [utterance.text for utterance in speech.split("train") if utterance.speed == 1.0]
    return ngram((text for text in texts if not lexicon.unknown([text])), config.order, lexicon.words, config.smoothing)


def _key(config: SpeechConfig, speech: Corpus, lexicon: Lexicon) -> str:
    said = [(utterance.id, utterance.text, utterance.split, utterance.phones) for utterance in speech.utterances]
    words = [(entry.word, entry.phones) for entry in lexicon.entries()]
    pdfs: tuple[object, ...] = ()
    if config.labels == PDFS and speech.pdfs and speech.tree:
        pdfs = speech.pdfs.fingerprint(), state_of(speech.tree), state_of(speech.tree.with_name("phones.txt"))
    made_of = (config.labels, config.states, pdfs, said, words)
    return fingerprint(VERSION, features_key(speech, config.features), *made_of)


def _write(folder: Path, tying: Tying, labels: Mapping[str, Ints], train: list[Ints], feature_set: FeatureSet) -> None:
    """The labels, and last the file by which one knows that all is there."""
    labels_N = np.full(len(feature_set.frames_NF), UNLABELLED, dtype=np.int32)
    for name, labels_T in labels.items():
        first, last = feature_set.rows(name)
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


@dataclass(frozen=True, eq=False)
class _States:
    """Finds the states of a corpus and the state of every frame."""

    config: SpeechConfig
    speech: Corpus
    lexicon: Lexicon
    features: FeatureSet

    def found(self) -> tuple[Tying, dict[str, Ints], list[Ints], FeatureSet]:
        """The tying, the labels of all utterances that have some, those of the training split, and whose they are."""
        if self.config.labels == PDFS:
            tree = self._kaldis_tree()
            labels = self._from_pdfs(tree)
            return tree.tying, labels, [labels[name] for name in self._train(labels)], self.features
        labels = self._flat_start() if self.config.labels == FLAT_START else self._from_times()
        tying: Tying = self._monophones
        if self.config.states:
            tying = self._tree(labels)
            labels = {name: relabelled(each, self._monophones, tying) for name, each in labels.items()}
        return tying, labels, [labels[name] for name in self._train(labels)], self.features

    @cached_property
    def _monophones(self) -> Monophones:
        phones = self.lexicon.phones
        return Monophones((*phones, *sorted(set(self.speech.phone_set).difference(phones))))

    def _train(self, labels: Mapping[str, Ints]) -> list[str]:
        return [utterance.id for utterance in self.speech.split("train") if utterance.id in labels]

    def _usable(self, split: str) -> list[Utterance]:
        return [utterance for utterance in self.speech.split(split) if utterance.id in self.features]

    def _from_times(self) -> dict[str, Ints]:
        labels = {
            utterance.id: frame_labels(utterance.phones, len(self.features[utterance.id]), self._monophones)
            for split in self.speech.splits
            for utterance in self._usable(split)
            if utterance.phones
        }
        if not self._train(labels):
            raise DataError(
                f"no training utterance of {self.speech.name} has phone times; "
                f"use settings.labels = '{FLAT_START}', which needs none"
            )
        return labels

    def _kaldis_tree(self) -> KaldiTree:
        if self.speech.pdfs is None or self.speech.tree is None:
            raise DataError(
                f"{self.speech.name} has no {'tree' if self.speech.pdfs else 'pdf.scp'}; settings.labels = '{PDFS}' needs "
                "pdf.scp in each data directory, and tree and phones.txt above them"
            )
        return read_tree(self.speech.tree, self.speech.tree.with_name("phones.txt"), self.lexicon.silence)

    def _from_pdfs(self, tree: KaldiTree) -> dict[str, Ints]:
        """Utterances whose numbers do not fit their frames, or the tree, have no labels."""
        assert self.speech.pdfs is not None
        states = np.arange(tree.tying.num_states, dtype=np.int32)
        states[list(tree.merged)] = list(tree.merged.values())
        labels: dict[str, Ints] = {}
        for utterance in self.speech.utterances:
            if utterance.id in self.features and utterance.id in self.speech.pdfs:
                try:
                    pdfs_T = self.speech.pdfs[utterance.id]
                except DataError:
                    continue  # it costs this utterance only, which is counted as one without labels
                if len(pdfs_T) == len(self.features[utterance.id]) and pdfs_T.min() >= 0 and pdfs_T.max() < len(states):
                    labels[utterance.id] = states[pdfs_T]
        if not self._train(labels):
            raise DataError(
                f"no training utterance of {self.speech.name} has as many pdfs as frames, all below {len(states)}; are "
                "they of this tree, and made with a frame shift of 10 ms?"
            )
        return labels

    def _flat_start(self) -> dict[str, Ints]:
        """From the training split alone; what is held out is aligned by its states, and has no part in them."""
        texts = {each.id: each.text for split in self.speech.splits for each in self._usable(split) if each.text}
        train = {name: text for name, text in texts.items() if self.speech[name].split == "train"}
        labels = flat_start(self.features, train, self.lexicon, self._monophones).alignments.labels
        others = Spoken({name: text for name, text in texts.items() if name not in train}, self.lexicon)
        return labels | aligned_alike(self.features, labels, others, self._monophones).labels

    def _tree(self, labels: Mapping[str, Ints]) -> Tying:
        train, tying = self._train(labels), self._monophones
        _, covariance = scatter(self.features[name] for name in train)
        states = [labels[name] for name in train]
        seen = Statistics.of((self.features[name] for name in train), states, tying.num_states)
        axes = discriminant_axes(covariance, seen, TREE_DIMENSIONS)
        directions = (np.asarray(self.features[name], np.float64) @ axes for name in train)
        return decision_tree(ContextStatistics.of(directions, states, tying), self.config.states)
