"""Finding corpora, and the folder in which unpacked corpora, features and labels are cached."""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roundelay.errors import DataError

ARCHIVES = (".tar.xz", ".tar.gz", ".tgz", ".tar")


def cache_folder(*parts: str) -> Path:
    """A folder under $ROUNDELAY_CACHE, by default ~/.cache/roundelay. It is created if it does not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("ROUNDELAY_CACHE") or Path(home) / "roundelay")
    folder = root.joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fingerprint(*parts: object) -> str:
    """Sixteen hexadecimal digits that change if the repr of any part changes.

    >>> fingerprint("an4", 40) == fingerprint("an4", 40), fingerprint("an4", 40) == fingerprint("an4", 41)
    (True, False)
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()[:16]


def state_of(path: Path) -> tuple[int, int]:
    """Size and modification time of a file; caches are renewed if they change. (-1, -1) if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock between the processes of this machine, one for each path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel if the process dies
        yield


def find_corpus(name: str, data: Path | None = None) -> Path:
    """The folder of a corpus. An archive is unpacked into the cache once.

    `data` is the folder or the archive itself, or a folder that has one of them; by default $ROUNDELAY_DATA. Raises DataError if
    the corpus is not there.
    """
    place = data or (Path(os.environ["ROUNDELAY_DATA"]) if os.environ.get("ROUNDELAY_DATA") else None)
    if place is None:
        raise DataError(f"{name} is not found: give its folder or archive with --data, or set ROUNDELAY_DATA")
    if not place.exists():
        raise DataError(f"there is no '{place}', which should have {name}; correct --data or ROUNDELAY_DATA")
    if place.is_file():
        return _unpacked(place)
    for path in sorted(place.iterdir()):
        if path.is_dir() and path.name.lower() == name:  # the folder's name may have capitals: LibriSpeech
            return path
    archives = (place / f"{name}{suffix}" for suffix in ARCHIVES)
    archive = next((path for path in archives if path.is_file()), None)
    if archive:
        return _unpacked(archive)
    if data is None:
        raise DataError(f"found neither a folder '{name}' nor an archive {name}{'|'.join(ARCHIVES)} in '{place}'")
    return data


def _unpacked(archive: Path) -> Path:
    """The cached content of an archive; if it is a single folder, that folder."""
    target = cache_folder("corpora") / f"{archive.name.split('.')[0]}-{fingerprint(state_of(archive))}"
    with locked(target.with_suffix(".lock")):
        if not target.is_dir():
            fresh = Path(tempfile.mkdtemp(dir=target.parent))
            try:
                with tarfile.open(archive) as tar:
                    tar.extractall(fresh, filter="data")
            except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                shutil.rmtree(fresh)
                raise DataError(f"cannot unpack '{archive}': {error}; get the archive again") from error
            fresh.rename(target)  # the folder appears only when it is complete
    inside = [path for path in target.iterdir() if path.is_dir()]
    return inside[0] if len(inside) == 1 else target
