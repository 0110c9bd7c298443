"""Kaldi data directories: a single one, or one for each split below a common folder.

wav.scp        recording → file; commands are refused unless allowed; of `sph2pipe … |` and `flac … |` the file is
               read without running the command
segments       optional: utterance → recording, start, end
reco2file_and_channel   optional: the channel of a recording in its file
text, utt2spk  words and speaker of each utterance
feats.scp, cmvn.scp     optional: features that replace ours
fmllr.scp, ivectors.scp optional: features that are appended, in this order
pdf.scp        optional: state numbers of frames (ali-to-pdf … ark,scp:pdf.ark,pdf.scp)

Optional in the common folder, or in the single directory: lexicon.txt; tree and phones.txt of the model that made pdf.scp.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from roundelay.errors import DataError
from roundelay.speech.cache import cache_folder, fingerprint
from roundelay.speech.corpora.arks import ArkFrames, ArkVectors, located, table_of
from roundelay.speech.corpus import Corpus, FrameSource, Problems, Utterance, split_name
from roundelay.speech.features import Frames

APPENDED = ("fmllr.scp", "ivectors.scp")


@dataclass(frozen=True)
class Recording:
    """A file and one of its channels; None: the mean of all."""

    path: Path
    channel: int | None = None


def kaldi(folder: Path, *, allow_pipes: bool = False) -> Corpus:
    """The corpus in a Kaldi data directory, or in several below one folder. The names of the directories are the splits."""
    single = (folder / "text").is_file()
    parts = [folder] if single else sorted(path.parent for path in folder.glob("*/text"))
    if not parts:
        raise DataError(f"'{folder}' is not a Kaldi data directory: there is no file 'text' in it or one level below")
    problems = Problems()
    utterances: dict[str, Utterance] = {}
    for part in parts:
        for utterance in _utterances(part, allow_pipes, problems):
            if utterance.id in utterances:
                problems.add("duplicate utterance", f"{utterance.id} of {part.name}")
            utterances.setdefault(utterance.id, utterance)
    pdfs = tuple(part / "pdf.scp" for part in parts if (part / "pdf.scp").is_file())
    return Corpus(
        folder.resolve().name,
        tuple(utterances.values()),
        f"Kaldi data directory: {', '.join(part.name for part in parts)}",
        problems=problems,
        frames=_source(parts, "feats.scp", "cmvn.scp"),
        appended=tuple(source for source in (_source(parts, name) for name in APPENDED) if source),
        pdfs=ArkVectors(pdfs) if pdfs else None,
        lexicon=_optional(folder / "lexicon.txt"),
        tree=_optional(folder / "tree"),
    )


def _optional(path: Path) -> Path | None:
    return path if path.is_file() else None


def _utterances(part: Path, allow_pipes: bool, problems: Problems) -> list[Utterance]:  # noqa: FBT001
    text = table_of(part / "text")
    speakers = table_of(part / "utt2spk") if (part / "utt2spk").is_file() else {}
    pieces = _pieces(part, text)
    recordings = _recordings(part, {piece[0] for piece in pieces.values()}, allow_pipes, problems)
    with_features = (part / "feats.scp").is_file()
    found = []
    for id, words in text.items():
        name, start_s, duration_s = pieces.get(id, (None, 0.0, None))
        recording = recordings.get(name) if name else None
        if recording and with_features and not recording.path.is_file():
            recording = None  # the audio is not needed, since there are features
        if recording is None and not with_features:
            problems.add("no recording", f"{id} of {part.name}")
            continue
        if not words:
            problems.add("no text", f"{id} of {part.name}")
        found.append(
            Utterance(
                id=id,
                audio=recording.path if recording else None,
                speaker=speakers.get(id, id),
                text=words,
                split=split_name(part.name),
                channel=recording.channel if recording else None,
                start_s=start_s,
                duration_s=duration_s,
            )
        )
    return found


def _pieces(part: Path, text: dict[str, str]) -> dict[str, tuple[str, float, float | None]]:
    """Recording, start and duration of each utterance. Without the file segments every recording is one utterance."""
    if not (part / "segments").is_file():
        return {id: (id, 0.0, None) for id in text}
    pieces: dict[str, tuple[str, float, float | None]] = {}
    for id, line in table_of(part / "segments").items():
        try:
            name, start, end = line.split()[:3]
            pieces[id] = (name, float(start), None if float(end) < 0 else float(end) - float(start))
        except ValueError as error:
            raise DataError(
                f"{part}/segments: '{id} {line}' does not have the form: utterance recording start end"
            ) from error
    return pieces


def _recordings(part: Path, names: set[str], allow_pipes: bool, problems: Problems) -> dict[str, Recording]:  # noqa: FBT001
    table = part / "wav.scp"
    if not table.is_file():
        return {}
    sides = table_of(part / "reco2file_and_channel") if (part / "reco2file_and_channel").is_file() else {}
    found = {}
    for name, where in table_of(table).items():
        if name not in names:
            continue
        recording = _recording(table, where, allow_pipes)
        if recording is None:
            problems.add(
                "pipe refused", f"{name}: {where} (if you trust this directory: settings.allow_pipes, --allow-pipes)"
            )
            continue
        if recording.channel is None and recording.path.suffix == ".sph" and name in sides:
            recording = Recording(recording.path, {"A": 0, "1": 0, "B": 1, "2": 1}.get(sides[name].split()[-1]))
        found[name] = recording
    return found


def _recording(table: Path, where: str, allow_pipes: bool) -> Recording | None:  # noqa: FBT001
    if not where.endswith("|"):
        return Recording(located(table, where))
    try:
        words = shlex.split(where.removesuffix("|"))
    except ValueError:  # an unbalanced quote, which a shell would refuse too
        return None
    if words and "|" not in where.removesuffix("|") and Path(words[0]).name in ("sph2pipe", "flac"):
        channel = re.search(r"-c\s+([12])\b", where) if Path(words[0]).name == "sph2pipe" else None
        file = next((word for word in reversed(words) if word.endswith((".sph", ".flac", ".wav"))), None)
        if file:
            return Recording(located(table, file), int(channel[1]) - 1 if channel else None)
    return Recording(_output_of(where.removesuffix("|"))) if allow_pipes else None


def _output_of(command: str) -> Path:
    """The output of a command, cached. A command that fails leaves an empty file, which is later counted as a problem."""
    path = cache_folder("pipes") / f"{fingerprint(command)}.wav"
    if not path.is_file():
        done = subprocess.run(command, shell=True, capture_output=True, check=False)  # allowed by the user
        path.write_bytes(done.stdout)
    return path


def _source(parts: list[Path], name: str, cmvn: str = "") -> FrameSource | None:
    sources = tuple(
        ArkFrames(part / name, part / cmvn if cmvn and (part / cmvn).is_file() else None)
        for part in parts
        if (part / name).is_file()
    )
    return FirstOf(sources) if sources else None


@dataclass(frozen=True)
class FirstOf:
    """Features of the same kind in several data directories."""

    sources: tuple[ArkFrames, ...]

    def __call__(self, utterance: Utterance) -> Frames:
        """Features from the first directory that has the utterance or its speaker."""
        for source in self.sources:
            if table_of(source.scp).keys() & {utterance.id, utterance.speaker}:
                return source(utterance)
        raise DataError(f"neither '{utterance.id}' nor its speaker is in {self.sources[0].scp.name}")

    def fingerprint(self) -> str:
        """A string that changes with any of the sources."""
        return fingerprint(*(source.fingerprint() for source in self.sources))
