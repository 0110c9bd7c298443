"""The features of a whole corpus: computed once, kept on disk, mapped into memory by every learner."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import DataError
from roundelay.speech.cache import cache_folder, fingerprint, locked, state_of
from roundelay.speech.corpus import Corpus, Problems, Utterance
from roundelay.speech.features import FeatureConfig, SpeakerFeatures, speaker_features

VERSION = 2  # of what features.py computes; changed with it, so that old caches are not taken for new ones
Progress = Callable[[int, int], None]


class FeatureSet:
    """Frames of many utterances in one file, read as views of mapped memory.

    Attributes:
        frames_NF: all of them, in half precision.
        problems: what was found while they were computed; utterances that could not be used are not in the set.
        audio_s: how much speech they are made of.
    """

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        self._folder = folder
        self.frames_NF: NDArray[np.float16] = np.load(folder / "frames.npy", mmap_mode="r")
        self.problems = Problems(tuple(case) for case in index["problems"])
        self.audio_s: float = index["audio_s"]
        self._rows: dict[str, tuple[int, int]] = {id: (first, last) for id, first, last in index["utterances"]}

    def __reduce__(self) -> tuple[type[FeatureSet], tuple[Path]]:
        return FeatureSet, (
            self._folder,
        )  # another process maps the file itself; a mapped array would travel as a copy

    @property
    def dimension(self) -> int:
        """F."""
        return int(self.frames_NF.shape[1])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    def __getitem__(self, id: str) -> NDArray[np.float16]:
        """T×F of one utterance."""
        first, last = self.rows(id)
        return self.frames_NF[first:last]

    def of(self, utterances: Iterable[Utterance]) -> dict[str, NDArray[np.float16]]:
        """T×F of those utterances that could be used."""
        return {utterance.id: self[utterance.id] for utterance in utterances if utterance.id in self}

    def problems_with(self, corpus: Corpus) -> Problems:
        """What is wrong with the corpus itself and with its audio; copies at other speeds are not told of again."""
        copies = {utterance.id for utterance in corpus.utterances if utterance.speed != 1.0}
        heard = (case for case in self.problems.cases if case[1].partition(":")[0] not in copies)
        return Problems((*corpus.problems.cases, *heard))

    def rows(self, id: str) -> tuple[int, int]:
        """First and last + 1 of an utterance's rows in `frames_NF`."""
        if id not in self._rows:
            raise DataError(f"there are no features of '{id}': unusable audio, or not of this corpus")
        return self._rows[id]


def features(
    corpus: Corpus, config: FeatureConfig | None = None, workers: int | None = None, progress: Progress | None = None
) -> FeatureSet:
    """The features of a corpus, from the cache or computed now; whoever comes while they are computed waits for them.

    `workers` is the number of processes, by default one for each core; the result does not depend on it.
    `progress(done, of)` counts utterances.
    """
    config = config or FeatureConfig()
    folder = cache_folder("features") / f"{corpus.name}-{features_key(corpus, config)}"
    with locked(folder.with_suffix(".lock")):
        if not (folder / "index.json").is_file():
            folder.mkdir(exist_ok=True)
            _write(folder, corpus, _computed(corpus, config, workers or len(os.sched_getaffinity(0))), progress)
    return FeatureSet(folder)


def features_key(corpus: Corpus, config: FeatureConfig) -> str:
    """Changes with everything the features depend on: configuration, files, speakers, what is appended, this code."""
    pieces = [
        (utt.id, utt.audio and str(utt.audio), utt.channel, utt.start_s, utt.duration_s, utt.speed, utt.speaker)
        for utt in corpus.utterances
    ]
    files = sorted({utt.audio for utt in corpus.utterances if utt.audio})
    sources = [source.fingerprint() if source else None for source in (corpus.frames, *corpus.appended)]
    return fingerprint(VERSION, config, pieces, [state_of(file) for file in files], sources)


def _computed(corpus: Corpus, config: FeatureConfig, workers: int) -> Iterator[SpeakerFeatures]:
    """Speaker by speaker, in the order of their first utterances."""
    speakers: dict[str, list[Utterance]] = {}
    for utterance in corpus.utterances:
        speakers.setdefault(utterance.speaker, []).append(utterance)
    compute = functools.partial(speaker_features, config=config, frames=corpus.frames, appended=corpus.appended)
    if workers == 1 or len(speakers) == 1:
        yield from map(compute, speakers.values())
        return
    # Fresh processes, not forks: this one may have threads of torch in it.
    with ProcessPoolExecutor(min(workers, len(speakers)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(compute, speakers.values())


def _write(folder: Path, corpus: Corpus, speakers: Iterable[SpeakerFeatures], progress: Progress | None) -> None:
    """Append speaker after speaker to one array; the index comes last, so that a set is there whole or not at all."""
    index: list[tuple[str, int, int]] = []
    problems: list[tuple[str, str]] = []
    rows, dimension, done, audio_s = 0, 0, 0, 0.0
    with (folder / "frames.npy").open("wb") as out:
        for speaker in speakers:
            for id, frames_TF in zip(speaker.ids, speaker.frames, strict=True):
                if dimension not in (0, frames_TF.shape[1]):
                    raise DataError(f"features of '{id}' have {frames_TF.shape[1]} dimensions, others {dimension}")
                if not dimension:
                    dimension = frames_TF.shape[1]
                    np.lib.format.write_array_header_1_0(out, _header(0, dimension))
                out.write(np.ascontiguousarray(frames_TF).tobytes())
                index.append((id, rows, rows + len(frames_TF)))
                rows += len(frames_TF)
            problems.extend(speaker.problems)
            audio_s += speaker.audio_s
            done += len(speaker.ids)
            if progress:
                progress(done, len(corpus))
        if not rows:
            raise DataError(f"no utterance of {corpus.name} is usable; {'; '.join(Problems(problems).summary())}")
        out.seek(0)
        np.lib.format.write_array_header_1_0(out, _header(rows, dimension))  # NumPy leaves room for the number to grow
    document = {"utterances": index, "problems": problems, "audio_s": audio_s}
    fresh = folder / "index.json.new"
    fresh.write_text(json.dumps(document))
    fresh.rename(folder / "index.json")


def _header(rows: int, dimension: int) -> dict[str, object]:
    return {"descr": "<f2", "fortran_order": False, "shape": (rows, dimension)}
