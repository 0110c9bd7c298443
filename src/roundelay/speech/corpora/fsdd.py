"""The Free Spoken Digit Dataset: six speakers say ten digits fifty times, 8 kHz.

Our archive is a manifest folder. A clone of https://github.com/Jakobovski/free-spoken-digit-dataset works too: its file names,
such as `recordings/7_jackson_32.wav`, say digit and speaker.
"""

from __future__ import annotations

import re
from pathlib import Path

from roundelay.errors import DataError
from roundelay.speech.cache import cache_folder, find_corpus, fingerprint
from roundelay.speech.corpora.manifest import NAMES, manifest, write_manifest
from roundelay.speech.corpus import Corpus
from roundelay.speech.synth.lexicon import DIGITS, dictionary, words
from roundelay.training.checkpoint import write_whole

SPLIT_OF_SPEAKER = {"theo": "valid", "yweweler": "test"}  # all others: train


def fsdd(data: Path | None = None) -> Corpus:
    """The corpus from its folder, clone or archive, by default in $ROUNDELAY_DATA."""
    folder = find_corpus("fsdd", data)
    table = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if table is None:
        table = cache_folder("corpora") / f"fsdd-{fingerprint(folder.resolve())}.tsv"
        write_fsdd_manifest(folder, table)
    lexicon = cache_folder("corpora") / "fsdd.dic"
    lines = [line for line in dictionary().splitlines(keepends=True) if re.split(r"[ (]", line)[0] in words(DIGITS)]
    write_whole(lexicon, "".join(lines).encode())
    description = "free spoken digit dataset: single digits by six speakers, 8 kHz"
    return manifest(table, "fsdd").replace(description=description, lexicon=lexicon)


def write_fsdd_manifest(folder: Path, table: Path) -> None:
    """Write a manifest for a clone, from the names of its recordings."""
    rows = []
    for path in sorted(folder.rglob("*.wav")):
        name = re.fullmatch(r"(\d)_([a-z]+)_(\d+)", path.stem)
        if name:
            split = SPLIT_OF_SPEAKER.get(name[2], "train")
            rows.append(
                {"path": path.resolve(), "split": split, "speaker": name[2], "text": words(DIGITS)[int(name[1])]}
            )
    if not rows:
        raise DataError(f"'{folder}' has neither a manifest nor recordings such as 7_jackson_32.wav")
    write_manifest(table, rows)
