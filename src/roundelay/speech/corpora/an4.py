"""AN4, CMU's alphanumeric corpus: 74 speakers read and spell census data, about 50 minutes.

Our archive is a manifest folder with phone and word times made by a machine, the lexicon of the corpus, and our own split by
speakers; its README says how it was made. CMU's archive an4_sphere.tar.gz (http://www.speech.cs.cmu.edu/databases/an4/) can be
used too:

an4/etc/an4_train.transcription, an4_test.transcription     <s> WORD … </s> (utterance)
an4/etc/an4.dic                                             the lexicon
an4/wav/*/SPEAKER/UTTERANCE.sph

CMU's archive has no phone times, so training needs `settings.labels = "flat-start"`. It has no validation split either, so every
eighth training speaker is held out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from roundelay.errors import DataError
from roundelay.speech.cache import cache_folder, find_corpus, fingerprint
from roundelay.speech.corpora.manifest import NAMES, manifest, write_manifest
from roundelay.speech.corpus import Corpus
from roundelay.speech.text_files import lines_of

VALID_EVERY = 8  # one in so many of CMU's training speakers is held out for validation
_LINE = re.compile(r"(?:<s>)?\s*(?P<text>.*?)\s*(?:</s>)?\s*\((?P<id>[^()\s]+)\)\s*")


def an4(data: Path | None = None) -> Corpus:
    """AN4 from its folder or archive, by default in $ROUNDELAY_DATA."""
    folder = find_corpus("an4", data)
    if any((folder / name).is_file() for name in NAMES) or not (folder / "etc").is_dir():
        corpus = manifest(folder, "an4")
    else:
        table = cache_folder("corpora") / f"an4-{fingerprint(folder.resolve())}.tsv"
        write_cmu_manifest(folder, table)
        corpus = manifest(table, "an4").replace(lexicon=folder / "etc" / "an4.dic")
    return corpus.replace(description="AN4: dates, addresses, numbers and spelled words, 16 kHz, phones of CMUdict")


def write_cmu_manifest(folder: Path, table: Path) -> None:
    """Write a manifest for CMU's files, with a validation split of training speakers."""
    audio = {path.stem: path.resolve() for path in sorted((folder / "wav").rglob("*.sph"))}
    rows: list[dict[str, str]] = []
    for split in ("train", "test"):
        for id, text in _transcripts(folder / "etc" / f"an4_{split}.transcription"):
            path = audio.get(id, folder.resolve() / "wav" / f"{id}.sph")
            rows.append({"id": id, "path": str(path), "split": split, "speaker": path.parent.name, "text": text})
    speakers = sorted({row["speaker"] for row in rows if row["split"] == "train"})
    held_out = speakers[1::VALID_EVERY]
    for row in rows:
        if row["split"] == "train" and row["speaker"] in held_out:
            row["split"] = "valid"
    write_manifest(table, rows)


def _transcripts(path: Path) -> Iterator[tuple[str, str]]:
    """Id and text of each utterance."""
    if not path.is_file():
        raise DataError(f"'{path.parents[1]}' has neither a manifest nor CMU's etc/{path.name}")
    for number, line in enumerate(lines_of(path), start=1):
        found = _LINE.fullmatch(line)
        if not found:
            raise DataError(f"{path}:{number} is not a transcript such as '<s> YES </s> (an1-fash-b)': '{line}'")
        yield found["id"], found["text"]
