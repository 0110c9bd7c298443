"""The features of a whole corpus: computed once, cached on disk, memory-mapped by every learner."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import DataError
from roundelay.speech.cache import cache_folder, fingerprint, locked, state_of
from roundelay.speech.corpus import Corpus, Problems, Utterance
from roundelay.speech.features import FeatureConfig, SpeakerFeatures, speaker_features

# Part of the cache's key: raise it when features.py computes something else, so that old caches are not used.
VERSION = 2


class FeatureSet:
    """Features of many utterances in one memory-mapped file.

    Attributes:
        frames_NF: the frames of all utterances, in half precision.
        problems: problems found while computing; unusable utterances are not in the set.
        audio_s: seconds of speech.
    """

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        self._folder = folder
        self.frames_NF: NDArray[np.float16] = np.load(folder / "frames.npy", mmap_mode="r")
        self.problems = Problems(tuple(case) for case in index["problems"])
        self.audio_s: float = index["audio_s"]
        self._rows: dict[str, tuple[int, int]] = {id: (first, last) for id, first, last in index["utterances"]}

    def __reduce__(self) -> tuple[type[FeatureSet], tuple[Path]]:
        return FeatureSet, (self._folder,)  # the other process maps the file; pickling the array would copy it

    @property
    def dimension(self) -> int:
        """F, the number of features per frame."""
        return int(self.frames_NF.shape[1])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    def __getitem__(self, id: str) -> NDArray[np.float16]:
        """T×F features of one utterance."""
        first, last = self.rows(id)
        return self.frames_NF[first:last]

    def of(self, utterances: Iterable[Utterance]) -> dict[str, NDArray[np.float16]]:
        """T×F features of each utterance that is in the set."""
        return {utterance.id: self[utterance.id] for utterance in utterances if utterance.id in self}

    def problems_with(self, corpus: Corpus) -> Problems:
        """Problems of the corpus and of its audio, without repetitions for copies at other speeds."""
        copies = {utterance.id for utterance in corpus.utterances if utterance.speed != 1.0}
        in_audio = (case for case in self.problems.cases if case[1].partition(":")[0] not in copies)
        return Problems((*corpus.problems.cases, *in_audio))

    def rows(self, id: str) -> tuple[int, int]:
        """First row and last row + 1 of an utterance in `frames_NF`. Raises DataError if it is not in the set."""
        if id not in self._rows:
            raise DataError(f"there are no features of '{id}': its audio is unusable, or it is not in this corpus")
        return self._rows[id]


def features(corpus: Corpus, config: FeatureConfig | None = None, workers: int | None = None) -> FeatureSet:
    """The features of a corpus, from the cache or computed now. Other processes wait while one computes them.

    `workers` is the number of processes, by default one per available processor; the result does not depend on it.
    """
    config = config or FeatureConfig()
    folder = cache_folder("features") / f"{corpus.name}-{features_key(corpus, config)}"
    with locked(folder.with_suffix(".lock")):
        if not (folder / "index.json").is_file():
            folder.mkdir(exist_ok=True)
            write_features(folder, corpus.name, _computed(corpus, config, workers or len(os.sched_getaffinity(0))))
    return FeatureSet(folder)


def features_key(corpus: Corpus, config: FeatureConfig) -> str:
    """A string that changes with everything that the features depend on: settings, files, speakers, sources, VERSION."""
    pieces = [
        (utt.id, utt.audio and str(utt.audio), utt.channel, utt.start_s, utt.duration_s, utt.speed, utt.speaker)
        for utt in corpus.utterances
    ]
    files = sorted({utt.audio for utt in corpus.utterances if utt.audio})
    sources = [source.fingerprint() if source else None for source in (corpus.frames, *corpus.appended)]
    return fingerprint(VERSION, config, pieces, [state_of(file) for file in files], sources)


def _computed(corpus: Corpus, config: FeatureConfig, workers: int) -> Iterator[SpeakerFeatures]:
    """Features of each speaker, in the order of the first utterances."""
    speakers: dict[str, list[Utterance]] = {}
    for utterance in corpus.utterances:
        speakers.setdefault(utterance.speaker, []).append(utterance)
    compute = functools.partial(speaker_features, config=config, frames=corpus.frames, appended=corpus.appended)
    if workers == 1 or len(speakers) == 1:
        yield from map(compute, speakers.values())
        return
    # Spawned processes, not forks, because this process may have threads of torch.
    with ProcessPoolExecutor(min(workers, len(speakers)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(compute, speakers.values())


def write_features(folder: Path, name: str, speakers: Iterable[SpeakerFeatures]) -> None:
    """Write the frames of all speakers to one array, and then index.json, whose presence means that the set is complete."""
    index: list[tuple[str, int, int]] = []
    problems: list[tuple[str, str]] = []
    rows, dimension, audio_s = 0, 0, 0.0
    with (folder / "frames.npy").open("wb") as out:
        for speaker in speakers:
            for id, frames_TF in zip(speaker.ids, speaker.frames, strict=True):
                if dimension not in (0, frames_TF.shape[1]):
                    raise DataError(
                        f"features of '{id}' have {frames_TF.shape[1]} dimensions, others {dimension}; "
                        "all features of a corpus must have the same number"
                    )
                if not dimension:
                    dimension = frames_TF.shape[1]
                    np.lib.format.write_array_header_1_0(out, _header(0, dimension))
                out.write(np.ascontiguousarray(frames_TF).tobytes())
                index.append((id, rows, rows + len(frames_TF)))
                rows += len(frames_TF)
            problems.extend(speaker.problems)
            audio_s += speaker.audio_s
        if not rows:
            raise DataError(f"no utterance of {name} is usable; {'; '.join(Problems(problems).summary())}")
        out.seek(0)
        # NumPy pads headers, so that the final one has the same length.
        np.lib.format.write_array_header_1_0(out, _header(rows, dimension))
    document = {"utterances": index, "problems": problems, "audio_s": audio_s}
    fresh = folder / "index.json.new"
    fresh.write_text(json.dumps(document))
    fresh.rename(folder / "index.json")


def _header(rows: int, dimension: int) -> dict[str, object]:
    return {"descr": "<f2", "fortran_order": False, "shape": (rows, dimension)}
