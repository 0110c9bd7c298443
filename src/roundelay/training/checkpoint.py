"""Checkpoints: one safetensors file per learner, and a manifest with checksums. Nothing is ever unpickled.

    checkpoints/000000000012800/learner-0.safetensors   weights, buffers, optimizer, random states, ...
                                learner-0.json          the checksum of that file, written after it
                                manifest.json           written when the files of all learners are there
    checkpoints/best.json                               which checkpoint has the best figures

The name of the folder is the number of samples seen. Every file is written under a temporary name, flushed and
renamed, so a file with its final name is complete. Every learner writes in a background thread and waits for no other.
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
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roundelay.errors import CheckpointError
from roundelay.weights.serialization import UNREADABLE, snapshot, to_bytes

log = logging.getLogger("roundelay")

FORMAT = 2
MANIFEST, BEST = "manifest.json", "best.json"
PATIENCE_S, RETRY_EVERY_S = 60.0, 1.0  # how long, and how often, a write to a full disk is tried again


Piece = dict[str, Any]
"""The part of a checkpoint that one learner has saved: learner, file, sha256, bytes, and `learners`, which lived then."""
Pieces = dict[int, dict[int, Piece]]
"""Pieces by the samples seen and the learner."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: of its files.
        samples_seen: samples that all learners had used.
        files: name and SHA-256 of the file of every learner.
    """

    folder: Path
    samples_seen: int
    files: dict[int, tuple[str, str]]

    def path(self, learner: int) -> Path:
        """The file of one learner."""
        return self.folder / self.files[learner][0]

    def verify(self) -> None:
        """Raise CheckpointError, with the name of the file, if a file cannot be read or its checksum is wrong."""
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
    """The complete checkpoints, oldest first. Raises CheckpointError for a manifest that cannot be read.

    A checkpoint that another learner removes meanwhile is left out.
    """
    found = []
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        try:
            found.append(_read_manifest(path))
        except CheckpointError:
            if path.exists():
                raise
    return found


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
        raise ValueError(f"'{name}' is not the name of a file beside the manifest")
    return name


def pieces(folder: Path) -> Pieces:
    """The pieces in `folder` of all checkpoints, complete or not. A file that cannot be read is left out."""
    numbers = sorted(int(path.name) for path in folder.glob("*/") if path.name.isdigit())
    return {number: found for number in numbers if (found := pieces_at(folder, number))}


def pieces_at(folder: Path, samples_seen: int) -> dict[int, Piece]:
    """The pieces of one checkpoint."""
    found: dict[int, Piece] = {}
    for path in sorted((folder / folder_name(samples_seen)).glob("learner-*.json")):
        with contextlib.suppress(*UNREADABLE):
            piece: Piece = json.loads(path.read_text())
            _bare(piece["file"])
            found[int(piece["learner"])] = piece
    return found


def is_complete(found: dict[int, Piece]) -> bool:
    """Whether the pieces of one checkpoint are all that a learner expected when it saved."""
    return any(found.keys() >= set(piece.get("learners", ())) for piece in found.values() if piece.get("learners"))


def at(folder: Path, samples_seen: int) -> Checkpoint:
    """The complete checkpoint at `samples_seen`. Its files are not verified."""
    return _read_manifest(folder / folder_name(samples_seen) / MANIFEST)


def abandon_after(folder: Path, samples_seen: int) -> None:
    """Move checkpoints after `samples_seen` to a folder abandoned-DATE.

    A run that resumes at `samples_seen` writes new checkpoints with the same names.
    """
    later = [
        path for path in folder.iterdir() if path.is_dir() and path.name.isdigit() and int(path.name) > samples_seen
    ]
    if later:
        aside = folder / f"abandoned-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir(exist_ok=True)
        for path in later:
            with contextlib.suppress(FileNotFoundError):  # another machine that sees this directory was faster
                path.rename(aside / path.name)


def choose(folder: Path, samples_seen: int | None = None) -> Checkpoint:
    """The newest complete checkpoint, or the one at `samples_seen`, with its files verified.

    Raises CheckpointError if there is no such checkpoint, or if one of its files is torn or altered. In the second case
    the message names another checkpoint that can be used, if there is one.
    """
    names = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    if not names:
        raise CheckpointError(
            f"there is no complete checkpoint in '{folder}'; begin a new run with another --out, without --resume"
        )
    wanted = names[-1] if samples_seen is None else folder_name(samples_seen)
    if wanted not in names:
        raise CheckpointError(
            f"there is no checkpoint at {samples_seen} samples; give --resume one of these numbers of samples: "
            + ", ".join(str(int(name)) for name in names)
        )
    try:
        return _whole(folder / wanted)
    except CheckpointError as error:
        whole = next((int(name) for name in reversed(names) if name != wanted and _is_whole(folder / name)), None)
        hint = (
            "no other checkpoint is whole, so begin a new run with another --out"
            if whole is None
            else f"the checkpoint at {whole} is whole: --resume {whole}"
        )
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


def folder_name(samples_seen: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"{samples_seen:015d}"


class Checkpoints:
    """Writes the files of one learner, in a background thread.

    Args:
        folder: of all checkpoints.
        learner: the number of the learner.
        keep: how many complete checkpoints stay, besides the best one.
    """

    def __init__(self, folder: Path, learner: int, keep: int) -> None:
        self.folder, self._learner, self._keep = folder, learner, keep
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="roundelay-checkpoint")
        self._writing: Future[None] | None = None
        self._next_one_waits = threading.Event()

    def save(self, samples_seen: int, state: Any, learners: Iterable[int]) -> None:  # noqa: ANN401
        """Copy the state, and start to write it. The checkpoint is complete when all `learners` have written theirs.

        Waits for the previous write. If the disk is full, the previous write is given up.
        """
        self._next_one_waits.set()
        self.wait()
        self._next_one_waits.clear()
        write = partial(self._write, samples_seen, snapshot(state), tuple(learners))
        self._writing = self._writer.submit(patiently, write, self._next_one_waits)

    def path(self, samples_seen: int, learner: int) -> Path:
        """The file of a learner in the checkpoint at `samples_seen`, whether it is written yet or not."""
        return self.folder / folder_name(samples_seen) / f"learner-{learner}.safetensors"

    def wait(self) -> None:
        """Wait until the last `save` is written. A disk that stays full for `PATIENCE_S` is logged, and not raised."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        except OSError as error:  # a full disk costs a checkpoint, not the run
            log.error("learner %d could not write a checkpoint: %s", self._learner, error)
        self._writing = None

    def close(self) -> None:
        """Wait for the last write, and end the thread."""
        self.wait()
        self._writer.shutdown()

    def _write(self, samples_seen: int, state: Any, learners: tuple[int, ...]) -> None:  # noqa: ANN401
        data = to_bytes(state)
        piece = {
            "learner": self._learner,
            "file": f"learner-{self._learner}.safetensors",
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
            "learners": list(learners),
        }
        write_piece(self.folder, samples_seen, piece, data)
        self.complete(samples_seen, learners)

    def complete(self, samples_seen: int, learners: Iterable[int]) -> bool:
        """Write the manifest if the files of all `learners` are there; returns whether they are."""
        if not write_manifest(self.folder, samples_seen, learners):
            return False
        self._prune()
        return True

    def remove_before(self, complete_elsewhere: Iterable[int]) -> None:
        """Remove files that are older than the newest `keep` of these checkpoints, which another machine has.

        The newest checkpoint that is complete here stays.
        """
        kept = sorted(complete_elsewhere)[-self._keep :]
        own = max((each.samples_seen for each in complete(self.folder)), default=-1)
        for path in sorted(self.folder.iterdir()):
            if (
                path.is_dir()
                and path.name.isdigit()
                and int(path.name) < min(kept, default=0)
                and int(path.name) != own
            ):
                _remove(path)

    def mark_best(self, samples_seen: int) -> None:
        """Keep the checkpoint at `samples_seen`, until another one is marked. A full disk is logged, not raised."""
        try:
            write_whole(self.folder / BEST, json.dumps({"samples_seen": samples_seen}).encode())
        except OSError as error:
            log.error("learner %d could not mark the best checkpoint: %s", self._learner, error)

    def best(self) -> int | None:
        """The `samples_seen` of the checkpoint that was marked as the best; None if none was."""
        with contextlib.suppress(*UNREADABLE):
            return int(json.loads((self.folder / BEST).read_text())["samples_seen"])
        return None

    def _prune(self) -> None:
        """Remove checkpoints that are older than the newest `keep` complete ones, except the best one.

        An older checkpoint with files of more learners also stays: after learners are lost, the checkpoints of the few
        that remain must not replace it. Newer incomplete checkpoints stay, because learners still write to them.
        """
        sizes = {each.folder.name: len(each.files) for each in complete(self.folder)}
        newest, best = sorted(sizes)[-self._keep :], self.best()
        most = max(sizes[name] for name in newest)
        for path in sorted(self.folder.iterdir()):
            old = path.is_dir() and path.name < newest[0] and sizes.get(path.name, 0) <= most
            if old and (best is None or path.name != folder_name(best)):
                _remove(path)


def _remove(folder: Path) -> None:
    """Remove a checkpoint. The manifest goes first, because a checkpoint with a manifest has all its files."""
    (folder / MANIFEST).unlink(missing_ok=True)
    _flush_directory(folder)
    shutil.rmtree(folder, ignore_errors=True)


def write_piece(folder: Path, samples_seen: int, piece: Piece, data: bytes | memoryview) -> None:
    """Write the file of one learner, and then what describes it."""
    folder = folder / folder_name(samples_seen)
    folder.mkdir(parents=True, exist_ok=True)
    _flush_directory(folder.parent)
    file = _bare(piece["file"])
    write_whole(folder / file, data)
    write_whole(folder / f"{Path(file).stem}.json", json.dumps(piece).encode())


def write_manifest(folder: Path, samples_seen: int, learners: Iterable[int]) -> bool:
    """Write the manifest if the files of all `learners` are there; returns whether they are.

    The manifest also lists the files of learners that saved and then left.
    """
    found = pieces_at(folder, samples_seen)
    if not found.keys() >= set(learners):
        return False
    document = {"format": FORMAT, "samples_seen": samples_seen, "files": [found[each] for each in sorted(found)]}
    write_whole(folder / folder_name(samples_seen) / MANIFEST, json.dumps(document, indent=2).encode())
    return True


def patiently(write: Callable[[], None], give_up: threading.Event | None = None) -> None:
    """Call `write`. If it raises OSError, such as for a full disk, call it again every second, for `PATIENCE_S`.

    Raises the OSError of the last call after that time, or when `give_up` is set.
    """
    end, give_up = time.monotonic() + PATIENCE_S, give_up or threading.Event()
    while True:
        try:
            return write()
        except OSError as error:
            log.warning("cannot write: %s; trying again", error)
            if time.monotonic() > end or give_up.wait(RETRY_EVERY_S):
                raise


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write a file under a temporary name, flush it to the disk and rename it, so that `path` is never half written.

    Afterwards the file survives a power failure, with that name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush_directory(folder: Path) -> None:
    """Wait until new, renamed and removed names of this directory are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
