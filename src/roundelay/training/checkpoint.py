"""Checkpoints: one safetensors file per learner, and a manifest with checksums. Nothing is ever unpickled.

    checkpoints/000000012800/learner-0.safetensors    weights, buffers, optimizer, random states, ...
                             learner-0.json           its checksum, written when the file is whole
                             manifest.json            written when all learners' files are there
    checkpoints/best.json                             which one was judged best

Files are written under another name, flushed and renamed, so that what has its name is whole. Learners write in the
background, each on its own: a slow or dead one keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.errors import CheckpointError
from roundelay.weights.serialization import UNREADABLE, snapshot, to_bytes

log = logging.getLogger("roundelay")

FORMAT = 2
MANIFEST, BEST = "manifest.json", "best.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete one."""

    folder: Path
    samples_seen: int
    files: dict[int, tuple[str, str]]  # learner: name, sha256

    def path(self, learner: int) -> Path:
        """That learner's file."""
        return self.folder / self.files[learner][0]

    def verify(self) -> None:
        """Raise CheckpointError, naming the file, unless every byte is as it was written."""
        for learner, (_, expected) in self.files.items():
            path = self.path(learner)
            try:
                with path.open("rb") as file:
                    digest = hashlib.sha256()
                    while piece := file.read(2**22):
                        digest.update(piece)
            except OSError as error:
                raise CheckpointError(f"cannot read '{path}': {error.strerror}") from None
            if digest.hexdigest() != expected:
                raise CheckpointError(f"'{path}' is torn or altered: its checksum is not the one in {MANIFEST}")


def complete(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints, oldest first. Raises CheckpointError for a manifest that cannot be read."""
    return [_read_manifest(path) for path in sorted(folder.glob(f"*/{MANIFEST}"))]


def _read_manifest(path: Path) -> Checkpoint:
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"'{path}' has format {manifest['format']!r}; this version reads {FORMAT}")
        files = {int(each["learner"]): (_bare(each["file"]), str(each["sha256"])) for each in manifest["files"]}
        return Checkpoint(path.parent, int(manifest["samples_seen"]), files)
    except CheckpointError:
        raise
    except UNREADABLE as error:
        raise CheckpointError(f"'{path}' is torn or altered: {type(error).__name__}: {error}") from error


def _bare(name: str) -> str:
    if os.sep in name or name.startswith(".") or not name.isprintable():
        raise ValueError(f"'{name}' is no name of a file beside the manifest")
    return name


def at(folder: Path, samples_seen: int) -> Checkpoint:
    """The complete checkpoint at `samples_seen`, as its manifest describes it."""
    return _read_manifest(folder / _name(samples_seen) / MANIFEST)


def abandon_after(folder: Path, samples_seen: int) -> None:
    """Put checkpoints aside that come after `samples_seen`: the run goes on from there, and will write them anew."""
    later = [
        path for path in folder.iterdir() if path.is_dir() and path.name.isdigit() and int(path.name) > samples_seen
    ]
    if later:
        aside = folder / f"abandoned-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir(exist_ok=True)
        for path in later:
            path.rename(aside / path.name)


def choose(folder: Path, samples_seen: int | None = None) -> Checkpoint:
    """The newest complete checkpoint, or the one at `samples_seen`, verified.

    Raises CheckpointError if there is none, or if it is torn or altered; then it says which one can be used instead.
    """
    names = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    if not names:
        raise CheckpointError(f"there is no complete checkpoint in '{folder}'; start without --resume")
    wanted = names[-1] if samples_seen is None else _name(samples_seen)
    if wanted not in names:
        raise CheckpointError(
            f"there is no checkpoint at {samples_seen}; there are {', '.join(str(int(n)) for n in names)}"
        )
    try:
        return _whole(folder / wanted)
    except CheckpointError as error:
        whole = next((int(name) for name in reversed(names) if name != wanted and _is_whole(folder / name)), None)
        hint = "no other one is whole" if whole is None else f"the one at {whole} is whole: --resume {whole}"
        raise CheckpointError(f"{error}; {hint}") from None


def _is_whole(folder: Path) -> bool:
    try:
        _whole(folder)
    except CheckpointError:
        return False
    return True


def _whole(folder: Path) -> Checkpoint:
    checkpoint = _read_manifest(folder / MANIFEST)
    checkpoint.verify()
    return checkpoint


def _name(samples_seen: int) -> str:
    return f"{samples_seen:015d}"


class Checkpoints:
    """One learner's side of the checkpoints of a run.

    Args:
        folder: where they are.
        rank: this learner.
        keep: how many complete ones, besides the best.
    """

    def __init__(self, folder: Path, rank: int, keep: int) -> None:
        self.folder, self._rank, self._keep = folder, rank, keep
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="roundelay-checkpoint")
        self._writing: Future[None] | None = None

    def save(self, samples_seen: int, state: Any, learners: Iterable[int]) -> None:  # noqa: ANN401
        """Copy the state, and write it in the background; complete when all `learners` have done so."""
        self.wait()
        self._writing = self._writer.submit(self._write, samples_seen, snapshot(state), tuple(learners))

    def path(self, samples_seen: int, learner: int) -> Path:
        """Where that learner's file of that samples_seen is."""
        return self.folder / _name(samples_seen) / f"learner-{learner}.safetensors"

    def wait(self) -> None:
        """Until the last one is written."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        except OSError as error:  # a full disk costs a checkpoint, not the run
            log.error("learner %d could not write a checkpoint: %s", self._rank, error)
        self._writing = None

    def close(self) -> None:
        """Finish writing."""
        self.wait()
        self._writer.shutdown()

    def _write(self, samples_seen: int, state: Any, learners: tuple[int, ...]) -> None:  # noqa: ANN401
        data = to_bytes(state)
        folder = self.folder / _name(samples_seen)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"learner-{self._rank}"
        write_whole(folder / f"{name}.safetensors", data)
        entry = {
            "learner": self._rank,
            "file": f"{name}.safetensors",
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
        }
        write_whole(folder / f"{name}.json", json.dumps(entry).encode())
        self._complete(folder, samples_seen, learners)

    def _complete(self, folder: Path, samples_seen: int, learners: tuple[int, ...]) -> None:
        """Whoever finds everybody's file writes the manifest; those who saved and left are part of it, too."""
        entries = [json.loads(entry.read_text()) for entry in sorted(folder.glob("learner-*.json"))]
        if not {entry["learner"] for entry in entries} >= set(learners):
            return
        files = sorted(entries, key=lambda entry: int(entry["learner"]))
        document = {"format": FORMAT, "samples_seen": samples_seen, "files": files}
        write_whole(folder / MANIFEST, json.dumps(document, indent=2).encode())
        self._prune()

    def mark_best(self, samples_seen: int) -> None:
        """Never prune that one."""
        write_whole(self.folder / BEST, json.dumps({"samples_seen": samples_seen}).encode())

    def best(self) -> int | None:
        """The samples_seen of the one judged best."""
        with contextlib.suppress(*UNREADABLE):
            return int(json.loads((self.folder / BEST).read_text())["samples_seen"])
        return None

    def _prune(self) -> None:
        """Remove what is older than the newest ones to keep; slower learners may still write to newer ones."""
        names = sorted(path.parent.name for path in self.folder.glob(f"*/{MANIFEST}"))
        best = self.best()
        for path in sorted(self.folder.iterdir()):
            if (
                path.is_dir()
                and path.name < names[-self._keep :][0]
                and path.name != (best is not None and _name(best))
            ):
                shutil.rmtree(path, ignore_errors=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write under another name, flush to the disk, rename: what is called `path` is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
