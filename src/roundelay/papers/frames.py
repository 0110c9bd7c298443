"""AN4 as a classification problem: speech frames with their neighbours in, phones out."""

from __future__ import annotations

import numpy as np
import torch

from roundelay.errors import DataError
from roundelay.simulation.problems import Examples, Problem
from roundelay.speech.corpora.an4 import an4
from roundelay.speech.corpus import Corpus
from roundelay.speech.feature_set import FeatureSet, features
from roundelay.speech.features import FeatureConfig
from roundelay.speech.hmm import Monophones, occurrences

CONTEXT = 5  # frames on each side
EVERY = 2  # every second frame is used, since neighbouring frames are nearly equal
SILENCE = "SIL"


def an4_frames(hidden: tuple[int, ...]) -> Problem:
    """Frames of the training speakers; those of the validation speakers are held out.

    AN4 is read from $ROUNDELAY_DATA, with the features of `roundelay.speech` (40 log-mel energies, normalised per speaker).
    Raises DataError if it is not there or has no phone times, and MissingExtraError without the 'speech' extra.
    """
    corpus = an4()
    if not corpus.phone_set:
        raise DataError("this copy of AN4 has no phone times (align/phones.ctm)")
    phones = Monophones((SILENCE, *(phone for phone in corpus.phone_set if phone != SILENCE)))
    found = features(corpus, FeatureConfig(deltas=False))
    return Problem(_examples(corpus, "train", found, phones), _examples(corpus, "valid", found, phones), hidden)


def _examples(corpus: Corpus, split: str, found: FeatureSet, phones: Monophones) -> Examples:
    """Spliced frames N×(2·CONTEXT + 1)F, and the number of the phone at the centre of each."""
    inputs, labels = [], []
    for utterance in corpus.split(split):
        if utterance.phones is None or utterance.id not in found:
            continue
        frames_TF = np.pad(found[utterance.id].astype(np.float32), ((CONTEXT, CONTEXT), (0, 0)), mode="edge")
        spliced = np.lib.stride_tricks.sliding_window_view(frames_TF, 2 * CONTEXT + 1, axis=0)[::EVERY]
        said = occurrences(utterance.phones, len(found[utterance.id]), phones)
        inputs.append(spliced.reshape(len(spliced), -1))
        labels.append(np.repeat(said.phones, said.durations)[::EVERY])
    return torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(labels).astype(np.int64))
