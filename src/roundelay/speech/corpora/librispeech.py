"""LibriSpeech: audiobooks by many speakers, 16 kHz (https://www.openslr.org/12), in the standard folders of its archives.

LibriSpeech/train-clean-100/SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt     an utterance and its words on each line
LibriSpeech/train-clean-100/SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER.flac
LibriSpeech/librispeech-lexicon.txt                                      optional; else every word is pronounced as its letters

Folders that begin with `train` are the training split. `dev-clean` is `valid`, `test-clean` is `test`; others keep their names
as splits (`roundelay evaluate RUN --split test-other`).
"""

from __future__ import annotations

from pathlib import Path

from roundelay.errors import DataError
from roundelay.speech.cache import find_corpus
from roundelay.speech.corpus import Corpus, Problems, Utterance
from roundelay.speech.text_files import lines_of

LEXICON = "librispeech-lexicon.txt"
SPLITS = {"dev-clean": "valid", "test-clean": "test"}


def librispeech(data: Path | None = None) -> Corpus:
    """The corpus from its folder or archive, by default in $ROUNDELAY_DATA. The parts that are there are used."""
    folder = find_corpus("librispeech", data)
    problems = Problems()
    utterances: list[Utterance] = []
    for table in sorted(folder.glob("*/*/*/*.trans.txt")):
        part = table.relative_to(folder).parts[0]
        split = "train" if part.startswith("train") else SPLITS.get(part, part)
        for line in lines_of(table):
            id, _, text = line.strip().partition(" ")
            if not text:
                problems.add("no text", id or str(table))
                continue
            utterances.append(Utterance(id, table.parent / f"{id}.flac", id.partition("-")[0], text.strip(), split))
    if not utterances:
        raise DataError(
            f"'{folder}' has no part of LibriSpeech: there is no PART/SPEAKER/CHAPTER/*.trans.txt; "
            "unpack an archive such as train-clean-100.tar.gz there"
        )
    lexicon = next((path for path in (folder / LEXICON, folder.parent / LEXICON) if path.is_file()), None)
    return Corpus("librispeech", tuple(utterances), "LibriSpeech: audiobooks, 16 kHz", lexicon, problems)
