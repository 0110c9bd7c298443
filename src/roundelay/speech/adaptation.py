"""Features that are adapted to their speaker: fMLLR transforms and i-vectors, appended to log-mel features.

Training knows the state of every frame (its labels). For other speech, Gaussians without adaptation find the states first, in a
decoding graph; then the transform is estimated, the speech is decoded with adapted Gaussians, and the transform is estimated
again. The network may give better states later (`--passes`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from roundelay.speech.cache import cache_folder
from roundelay.speech.corpus import Utterance
from roundelay.speech.decode import Decoder, Scales
from roundelay.speech.feature_set import FeatureSet, write_features
from roundelay.speech.features import SpeakerFeatures
from roundelay.speech.flat_start import DIMENSIONS
from roundelay.speech.fmllr import RowStatistics, SpeakerModel, Transformed, adaptive_training, transformed
from roundelay.speech.gaussians import LEAST_VARIANCE, FramesByUtterance, Gaussians, Mixtures
from roundelay.speech.gmm import Gmm
from roundelay.speech.hmm import Floats, Tying, self_loops
from roundelay.speech.ivector import IvectorExtractor, Ubm
from roundelay.speech.parallel import in_processes
from roundelay.speech.projection import Projection, mean_and_covariance
from roundelay.speech.segments import Ints
from roundelay.training.config import at_least

LOGMEL, FMLLR, IVECTOR = "logmel", "fmllr", "ivector"
KINDS = (LOGMEL, FMLLR, IVECTOR)
FIRST_PASS_SCALE = 0.1  # of the Gaussians' log likelihoods, since frames are not independent
FRAMES_PER_GAUSSIAN, MOST_GAUSSIANS = 100, 16  # a state has one Gaussian for every 100 frames, at most 16
UBM_FRAMES = 500_000  # at most, to fit the background model of i-vectors
SPEAKERS_AT_ONCE = 64  # so many speakers' adapted features are in memory at a time


@dataclass(frozen=True)
class IvectorConfig:
    """Sizes of i-vectors.

    Attributes:
        dimension: of the i-vector; 100 in the papers. More dimensions than training speakers are of no use.
        components: Gaussians of the background model.
    """

    dimension: int = at_least(1, 100)
    components: int = at_least(1, 256)


class Training(NamedTuple):
    """What an adaptation is trained on: features, states and speakers of the training utterances, and the tying."""

    features: FramesByUtterance
    labels: Mapping[str, Ints]
    speakers: Mapping[str, str]
    tying: Tying


@dataclass(frozen=True, eq=False)
class Adaptation:
    """Everything that features of any speaker need.

    Attributes:
        kinds: which features are put side by side, in this order.
        gmm: Gaussians of unadapted features.
        model: Gaussians of adapted features; None without fMLLR.
        extractor: None without i-vectors.
        scale_K: 1/σ of adapted features over all training speakers, so that their variance is 1.
    """

    kinds: tuple[str, ...]
    gmm: Gmm
    model: SpeakerModel | None
    extractor: IvectorExtractor | None
    scale_K: Floats

    @classmethod
    def fit(cls, kinds: tuple[str, ...], training: Training, ivector: IvectorConfig) -> Adaptation:
        """Train Gaussians, adapted Gaussians and i-vectors on labelled utterances."""
        features, labels, _, tying = training
        projection = Projection.principal(features, labels, DIMENSIONS)
        projection = projection.discriminating(features, labels, tying.num_states)
        # Many passes follow, so projected frames are kept, but on disk.
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            said = (SpeakerFeatures([name], [projection(features[name]).astype(np.float16)]) for name in labels)
            write_features(Path(folder), "the training split", said)
            return cls._fit(kinds, training._replace(features=FeatureSet(Path(folder))), projection, ivector)

    @classmethod
    def _fit(
        cls, kinds: tuple[str, ...], training: Training, projection: Projection, ivector: IvectorConfig
    ) -> Adaptation:
        """Like `fit`, but `training` has features that are already projected."""
        projected, labels, speakers, tying = training
        count_S = sum((np.bincount(each, minlength=tying.num_states) for each in labels.values()), np.zeros(1))
        number_S = np.clip(count_S // FRAMES_PER_GAUSSIAN, 1, MOST_GAUSSIANS).astype(np.int32)
        mixtures = Mixtures.fit(projected, labels, number_S)
        gmm = Gmm(projection, mixtures, self_loops(labels.values(), tying.num_states))
        model, scale_K = None, np.ones(0, np.float32)
        if FMLLR in kinds:
            model, transforms = adaptive_training(projected, labels, speakers, mixtures, tying.phone_of_state != 0)
            adapted = Transformed(projected, transforms, speakers)
            _, covariance = mean_and_covariance(adapted[name] for name in labels)
            scale_K = (1 / np.sqrt(np.maximum(np.diag(covariance), LEAST_VARIANCE))).astype(np.float32)
        extractor = _extractor(projected, labels, speakers, ivector) if IVECTOR in kinds else None
        return cls(kinds, gmm, model, extractor, scale_K)

    def states(self, frames: Mapping[str, NDArray[Any]], decoder: Decoder) -> dict[str, Ints]:
        """The states of one speaker's utterances, recognised with adapted Gaussians."""
        assert self.model
        found = {name: decoder(self.gmm.log_likelihoods(each)).states_T for name, each in frames.items()}
        projected = {name: self.gmm.projection(each) for name, each in frames.items()}
        W = self.model.transform([(projected[name], found[name]) for name in frames])
        mixtures = self.model.mixtures
        return {name: decoder(mixtures.log_likelihoods(transformed(projected[name], W))).states_T for name in frames}

    def adapted(
        self, frames: Mapping[str, NDArray[Any]], states: Mapping[str, Ints | None], decoder: Decoder | None
    ) -> dict[str, NDArray[np.float16]]:
        """Adapted features of one speaker's utterances. `decoder` finds the states of an utterance if None is given."""
        projected = {name: self.gmm.projection(each) for name, each in frames.items()}
        columns: dict[str, dict[str, NDArray[Any]]] = {LOGMEL: dict(frames)}
        if self.model:
            unknown = {name: frames[name] for name in frames if states[name] is None}
            heard = self.states(unknown, decoder) if decoder and unknown else {}
            known = {name: each for name in frames if (each := heard.get(name, states[name])) is not None}
            W = self.model.transform([(projected[name], known[name]) for name in known])
            columns[FMLLR] = {name: transformed(each, W) * self.scale_K for name, each in projected.items()}
        if self.extractor:
            vector = self.extractor(projected.values())
            columns[IVECTOR] = {name: np.broadcast_to(vector, (len(frames[name]), len(vector))) for name in frames}
        return {
            name: np.concatenate([columns[kind][name] for kind in self.kinds], axis=1, dtype=np.float16)
            for name in frames
        }

    def log_likelihoods(self, adapted_TF: NDArray[Any]) -> Floats | None:
        """T×S ln p(x | s) by the adapted Gaussians, from features that `adapted` made; None without fMLLR."""
        if self.model is None:
            return None
        widths = {LOGMEL: len(self.gmm.projection.principal_DK), FMLLR: len(self.scale_K)}
        widths[IVECTOR] = self.extractor.T.shape[2] if self.extractor else 0
        first = sum(widths[kind] for kind in self.kinds[: self.kinds.index(FMLLR)])
        fmllr_TK = adapted_TF[:, first : first + len(self.scale_K)].astype(np.float32) / self.scale_K
        return self.model.mixtures.log_likelihoods(fmllr_TK)

    def save(self, path: Path) -> None:
        """Write all arrays to one .npz file."""
        arrays: dict[str, NDArray[Any]] = {"kinds": np.array(self.kinds), "scale": self.scale_K}
        assert self.gmm.projection.discriminant is not None
        arrays |= {"principal": self.gmm.projection.principal_DK, "discriminant": self.gmm.projection.discriminant}
        arrays |= {"self_loops": self.gmm.self_loops} | _mixture_arrays("plain", self.gmm.mixtures)
        if self.model:
            prior = self.model.prior
            arrays |= _mixture_arrays("adapted", self.model.mixtures)
            arrays |= {"speech": self.model.speech_S, "G": prior.G, "k": prior.k, "frames": np.array(prior.frames)}
        if self.extractor:
            ubm = self.extractor.ubm
            arrays |= {"T": self.extractor.T, "ubm_weight": ubm.log_weight_C}
            arrays |= {"ubm_mean": ubm.gaussians.mean_SD, "ubm_variance": ubm.gaussians.variance_SD}
        np.savez(path, **arrays)  # type: ignore[arg-type]  # the stubs take a name for allow_pickle

    @classmethod
    def load(cls, path: Path) -> Adaptation:
        """The inverse of `save`."""
        with np.load(path, allow_pickle=False) as stored:
            a = dict(stored)
        gmm = Gmm(Projection(a["principal"], a["discriminant"]), _mixtures("plain", a), a["self_loops"])
        model = extractor = None
        if "G" in a:
            model = SpeakerModel(
                _mixtures("adapted", a), a["speech"], RowStatistics(a["G"], a["k"], float(a["frames"]))
            )
        if "T" in a:
            extractor = IvectorExtractor(Ubm(Gaussians(a["ubm_mean"], a["ubm_variance"]), a["ubm_weight"]), a["T"])
        return cls(tuple(a["kinds"].tolist()), gmm, model, extractor, a["scale"])


def _mixture_arrays(name: str, mixtures: Mixtures) -> dict[str, NDArray[Any]]:
    of = mixtures.components
    arrays: dict[str, NDArray[Any]] = {f"{name}_mean": of.mean_SD, f"{name}_variance": of.variance_SD}
    return arrays | {f"{name}_weight": mixtures.log_weight_C, f"{name}_first": mixtures.first_S}


def _mixtures(name: str, a: Mapping[str, NDArray[Any]]) -> Mixtures:
    return Mixtures(Gaussians(a[f"{name}_mean"], a[f"{name}_variance"]), a[f"{name}_weight"], a[f"{name}_first"])


def _extractor(
    projected: FramesByUtterance, labels: Mapping[str, Ints], speakers: Mapping[str, str], config: IvectorConfig
) -> IvectorExtractor:
    lengths = {name: len(labels_T) for name, labels_T in labels.items()}
    order = np.random.default_rng(0).permutation(sorted(lengths)).tolist()
    enough = int(np.searchsorted(np.cumsum([lengths[name] for name in order]), UBM_FRAMES)) + 1
    ubm = Ubm.fit(projected, {name: lengths[name] for name in order[:enough]}, config.components)
    by_speaker: dict[str, list[str]] = {}
    for name in labels:
        by_speaker.setdefault(speakers[name], []).append(name)
    seen = [ubm.statistics(projected[name] for name in names) for names in by_speaker.values()]
    return IvectorExtractor.fit(ubm, seen, config.dimension)


def adapted_speakers(
    adaptation: Adaptation,
    features: FramesByUtterance,
    utterances: Iterable[Utterance],
    states: Mapping[str, Ints],
    decoder: Decoder | None,
) -> Iterator[SpeakerFeatures]:
    """Adapted features of each speaker, in the order of the first utterances.

    States that are not given are found by a first pass in the graph of `decoder`.
    """
    loops, scales = adaptation.gmm.self_loops, Scales(acoustic=FIRST_PASS_SCALE)
    first_pass = replace(decoder, self_loops=loops, scales=scales) if decoder else None
    speakers: dict[str, list[str]] = {}
    for utterance in utterances:
        speakers.setdefault(utterance.speaker, []).append(utterance.id)
    left = iter(speakers.items())
    while batch := dict(islice(left, SPEAKERS_AT_ONCE)):
        jobs = {
            speaker: {name: (features[name], states.get(name)) for name in names} for speaker, names in batch.items()
        }
        found = in_processes(_adapted_share, jobs, None, adaptation, first_pass)
        for frames in found.values():
            yield SpeakerFeatures(list(frames), list(frames.values()))


def _adapted_share(
    jobs: Mapping[str, Mapping[str, tuple[NDArray[Any], Ints | None]]], adaptation: Adaptation, decoder: Decoder | None
) -> dict[str, dict[str, NDArray[np.float16]]]:
    return {
        speaker: adaptation.adapted(
            {name: frames for name, (frames, _) in said.items()},
            {name: each for name, (_, each) in said.items()},
            decoder,
        )
        for speaker, said in jobs.items()
    }
