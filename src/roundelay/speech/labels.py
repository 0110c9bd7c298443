"""The states of a corpus and the state of every frame: from phone times, from transcripts alone, or from Kaldi's alignments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from roundelay.errors import DataError
from roundelay.speech.align import Transcripts
from roundelay.speech.config import FLAT_START, PDFS, SpeechConfig
from roundelay.speech.corpus import Corpus, Utterance
from roundelay.speech.feature_set import FeatureSet
from roundelay.speech.flat_start import flat_start
from roundelay.speech.gaussians import Labelled, Statistics
from roundelay.speech.hmm import Monophones, Tying, frame_labels
from roundelay.speech.kaldi_tree import KaldiTree, read_tree
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.projection import discriminant_axes, mean_and_covariance
from roundelay.speech.segments import Ints
from roundelay.speech.tree import relabelled
from roundelay.speech.tree_growing import ContextStatistics, decision_tree

TREE_DIMENSIONS = 40  # discriminant directions of the features that the decision tree is grown from


class StateLabels(NamedTuple):
    """The tying, and the state of each frame of every utterance that could be labelled."""

    tying: Tying
    labels: dict[str, Ints]


@dataclass(frozen=True, eq=False)
class Labeller:
    """Finds the states of a corpus and the state of every frame."""

    config: SpeechConfig
    corpus: Corpus
    lexicon: Lexicon
    features: FeatureSet

    def state_labels(self) -> StateLabels:
        """Labels as `config.labels` says, in as many states as `config.states` says. Raises DataError if there are none."""
        if self.config.labels == PDFS:
            kaldi_tree = self._kaldi_tree()
            return StateLabels(kaldi_tree.tying, self._from_pdfs(kaldi_tree))
        labels = self._from_transcripts() if self.config.labels == FLAT_START else self._from_times()
        if not self.config.states:
            return StateLabels(self._monophones, labels)
        tree = self._grown_tree(labels)
        return StateLabels(tree, {name: relabelled(each, self._monophones, tree) for name, each in labels.items()})

    def training_labels(self, labels: Mapping[str, Ints]) -> list[Ints]:
        """Labels of the training split."""
        return [labels[name] for name in self._train(labels)]

    @cached_property
    def _monophones(self) -> Monophones:
        phones = self.lexicon.phones
        return Monophones((*phones, *sorted(set(self.corpus.phone_set).difference(phones))))

    def _train(self, labels: Mapping[str, Ints]) -> list[str]:
        return [utterance.id for utterance in self.corpus.split("train") if utterance.id in labels]

    def _usable(self) -> list[Utterance]:
        """Utterances with features, split by split."""
        return [each for split in self.corpus.splits for each in self.corpus.split(split) if each.id in self.features]

    def _from_times(self) -> dict[str, Ints]:
        labels = {
            utterance.id: frame_labels(utterance.phones, len(self.features[utterance.id]), self._monophones)
            for utterance in self._usable()
            if utterance.phones
        }
        if not self._train(labels):
            raise DataError(
                f"no training utterance of {self.corpus.name} has phone times; "
                f"use settings.labels = '{FLAT_START}', which needs none"
            )
        return labels

    def _from_transcripts(self) -> dict[str, Ints]:
        """Train Gaussians on the training split only, then align the other splits with them."""
        texts = {each.id: each.text for each in self._usable() if each.text}
        train = {name: text for name, text in texts.items() if self.corpus[name].split == "train"}
        start = flat_start(self.features, Transcripts(train, self.lexicon, self._monophones))
        others = [name for name in texts if name not in train]
        further = start.model.aligned(self.features, Transcripts(texts, self.lexicon, self._monophones), others)
        return start.alignments.labels | further.labels

    def _kaldi_tree(self) -> KaldiTree:
        if self.corpus.pdfs is None or self.corpus.tree is None:
            raise DataError(
                f"{self.corpus.name} has no {'tree' if self.corpus.pdfs else 'pdf.scp'}; settings.labels = '{PDFS}' needs "
                "pdf.scp in each data directory, and tree and phones.txt above them"
            )
        return read_tree(self.corpus.tree, self.corpus.tree.with_name("phones.txt"), self.lexicon.silence)

    def _from_pdfs(self, tree: KaldiTree) -> dict[str, Ints]:
        """Kaldi's pdfs as states. An utterance whose pdfs do not fit its frames or the tree gets no labels."""
        assert self.corpus.pdfs is not None
        state_of_pdf = np.arange(tree.tying.num_states, dtype=np.int32)
        state_of_pdf[list(tree.merged)] = list(tree.merged.values())
        labels: dict[str, Ints] = {}
        for utterance in self.corpus.utterances:
            if utterance.id not in self.features or utterance.id not in self.corpus.pdfs:
                continue
            try:
                pdfs_T = self.corpus.pdfs[utterance.id]
            except DataError:
                continue  # only this utterance is lost; it is counted as one without labels
            as_long = len(pdfs_T) == len(self.features[utterance.id])
            if as_long and pdfs_T.min() >= 0 and pdfs_T.max() < len(state_of_pdf):
                labels[utterance.id] = state_of_pdf[pdfs_T]
        if not self._train(labels):
            raise DataError(
                f"no training utterance of {self.corpus.name} has as many pdfs as frames, all below {len(state_of_pdf)}; "
                "check that they belong to this tree and were made with a frame shift of 10 ms"
            )
        return labels

    def _grown_tree(self, labels: Mapping[str, Ints]) -> Tying:
        train = {name: labels[name] for name in self._train(labels)}
        _, covariance = mean_and_covariance(self.features[name] for name in train)
        seen = Statistics.of(Labelled(self.features, train), self._monophones.num_states)
        axes = discriminant_axes(covariance, seen, TREE_DIMENSIONS)
        projected = (np.asarray(self.features[name], np.float64) @ axes for name in train)
        return decision_tree(ContextStatistics.of(projected, train.values(), self._monophones), self.config.states)
