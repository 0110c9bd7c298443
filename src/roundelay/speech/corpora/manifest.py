"""A corpus in a folder with a table of utterances, and optionally with phone times and a lexicon.

    DIR/manifest.tsv         a header row, then one utterance per row; columns in any order, tabs between them
    DIR/align/phones.ctm     optional: phone times
    DIR/align/words.ctm      optional: word times
    DIR/lexicon/*.dic        optional: pronunciations

The columns `path` (relative to DIR) and `text` are required. Optional columns and their defaults:

    id              the name of the file, with `start` if the file has several utterances
    split           test
    speaker         every utterance has its own
    channel         counted from 0; the mean of all channels
    start, seconds  the whole file

Other columns are ignored. An utterance whose file is missing is kept, so that an evaluation counts its words as deletions.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from roundelay.errors import DataError
from roundelay.speech.corpus import Corpus, Problems, Utterance, split_name
from roundelay.speech.segments import Segments, read_ctm
from roundelay.speech.text_files import lines_of
from roundelay.training.checkpoint import write_whole

NAMES = ("manifest.tsv", "MANIFEST.tsv")
COLUMNS = ("id", "path", "split", "speaker", "channel", "start", "seconds", "text")
REQUIRED = ("path", "text")
SLACK_S = 0.05  # phone times may end this much after the audio: half a window, and rounding


def manifest(folder: Path, name: str | None = None) -> Corpus:
    """The corpus in a folder with a manifest. `folder` may be the manifest itself."""
    table = folder if folder.is_file() else next((folder / file for file in NAMES if (folder / file).is_file()), None)
    if table is None:
        raise DataError(f"'{folder}' has no {NAMES[0]}: a table with the columns {', '.join(COLUMNS)}")
    root = table.parent
    problems = Problems()
    rows = _rows(table, problems)
    ids = _ids(rows)
    phones, words = (_times(root / "align" / f"{kind}.ctm") for kind in ("phones", "words"))
    utterances: dict[str, Utterance] = {}
    for id, row in zip(ids, rows, strict=True):
        if id in utterances:
            problems.add("duplicate utterance", id)
            continue
        utterance = _utterance(id, row, root, problems)
        if utterance:
            utterances[id] = _aligned(utterance, phones, words, problems)
    for kind, times in (("phone", phones), ("word", words)):
        for id in sorted(times.keys() - set(ids)):
            problems.add("stray alignment", f"{id} has {kind} times but is not in {table.name}")
    if unsplit := sum(not row.get("split") for row in rows):
        advice = "write train, valid or test into the column split"
        problems.add("no split", f"{unsplit} of {len(rows)} utterances count as test; {advice}")
    lexicons = sorted((root / "lexicon").glob("*.dic"))
    return Corpus(
        name or root.resolve().name,
        tuple(utterances.values()),
        f"the utterances of {table.name}",
        lexicons[0] if lexicons else None,
        problems,
    )


def write_manifest(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write a manifest. The keys of the first row are the columns."""
    table = list(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(table[0]), delimiter="\t", quoting=csv.QUOTE_NONE, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_whole(path, out.getvalue().encode())


def _rows(table: Path, problems: Problems) -> list[dict[str, str]]:
    """Rows with a path. Empty rows, which spreadsheets write at the end, are skipped."""
    reader = csv.DictReader(lines_of(table), delimiter="\t", quoting=csv.QUOTE_NONE, restval="")
    columns = [column.strip() for column in reader.fieldnames or ()]
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        raise DataError(f"{table} lacks the column {' and '.join(missing)}; its first line is {' | '.join(columns)}")
    rows = []
    for line in reader:
        row = {key.strip(): value.strip() for key, value in line.items() if key}
        if row["path"]:
            rows.append(row)
        elif any(row.values()):
            problems.add("bad row", f"line {reader.line_num} has no path")
    return rows


def _ids(rows: list[dict[str, str]]) -> list[str]:
    """The id of each row: the id column, else the file name, else the path, else path and start; the first that is unique."""
    stems = [row.get("id") or Path(row["path"]).stem for row in rows]
    paths = [str(Path(row["path"]).with_suffix("")).replace("/", "-") for row in rows]
    pieces = [f"{path}-{row.get('start') or '0'}" for path, row in zip(paths, rows, strict=True)]
    count = Counter(stems), Counter(paths)
    return [
        stem if row.get("id") or count[0][stem] == 1 else path if count[1][path] == 1 else piece
        for stem, path, piece, row in zip(stems, paths, pieces, rows, strict=True)
    ]


def _utterance(id: str, row: dict[str, str], root: Path, problems: Problems) -> Utterance | None:
    try:
        channel, start_s, duration_s = (_number(row, name) for name in ("channel", "start", "seconds"))
    except ValueError as error:
        problems.add("bad row", f"{id}: {error}")
        return None
    if not row["text"]:
        problems.add("no text", f"{id} (kept: words recognised in it count as insertions)")
    return Utterance(
        id=id,
        audio=root / row["path"],
        speaker=row.get("speaker") or id,
        text=" ".join(row["text"].split()),
        split=split_name(row.get("split") or "test"),
        channel=None if channel is None else int(channel),
        start_s=start_s or 0.0,
        duration_s=duration_s,
    )


def _number(row: Mapping[str, str], name: str) -> float | None:
    """The number in a column; None if it is empty. Raises ValueError if it is negative or not a number."""
    text = row.get(name)
    if not text:
        return None
    number = int(text) if name == "channel" else float(text)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got '{text}'")
    return number


def _times(path: Path) -> dict[str, Segments]:
    return read_ctm(path) if path.is_file() else {}


def _aligned(
    utterance: Utterance, phones: Mapping[str, Segments], words: Mapping[str, Segments], problems: Problems
) -> Utterance:
    """The utterance with its times. Times that do not fit the text or the length are dropped."""
    id = utterance.id
    phone_times, word_times = phones.get(id), words.get(id)
    if phones and phone_times is None:
        problems.add("not aligned", id)
    if word_times and " ".join(word_times.symbols) != utterance.text:
        problems.add("alignment of other words", f"{id}: '{utterance.text}', aligned '{' '.join(word_times.symbols)}'")
        return utterance
    if phone_times and utterance.duration_s and phone_times.end_s > utterance.duration_s + SLACK_S:
        problems.add("alignment too long", f"{id}: {phone_times.end_s:.2f} s of {utterance.duration_s:.2f} s")
        return utterance
    return dataclasses.replace(utterance, phones=phone_times, words=word_times)
