"""Where data is found and where what was made of it is kept: archives, unpacked corpora, features."""

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
    """A folder under $ROUNDELAY_CACHE, or else under the user's cache; made if it is not there."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("ROUNDELAY_CACHE") or Path(home) / "roundelay")
    folder = root.joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fingerprint(*parts: object) -> str:
    """Sixteen hexadecimal digits that change with any of the parts; parts are compared by their repr.

    >>> fingerprint("an4", 40) == fingerprint("an4", 40), fingerprint("an4", 40) == fingerprint("an4", 41)
    (True, False)
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()[:16]


def state_of(path: Path) -> tuple[int, int]:
    """Size and time of change of a file, by which a cache knows that it is another one; (-1, -1) if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process of this machine at a time is inside, for any one path; the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel if the process dies
        yield


def find_corpus(name: str, data: Path | None = None) -> Path:
    """The folder of a corpus that comes as an archive or unpacked; an archive is unpacked into the cache once.

    Looks at `data` itself and inside it; without it, in the directory that ROUNDELAY_DATA names.
    """
    place = data or (Path(os.environ["ROUNDELAY_DATA"]) if os.environ.get("ROUNDELAY_DATA") else None)
    if place is None:
        raise DataError(f"where is {name}? Give its folder or archive with --data, or set ROUNDELAY_DATA")
    if not place.exists():
        raise DataError(f"there is no '{place}', where {name} should be")
    if place.is_file():
        return _unpacked(place)
    if (place / name).is_dir():
        return place / name
    archives = (place / f"{name}{suffix}" for suffix in ARCHIVES)
    archive = next((path for path in archives if path.is_file()), None)
    if archive:
        return _unpacked(archive)
    if data is None:
        raise DataError(f"found neither a folder '{name}' nor an archive {name}{'|'.join(ARCHIVES)} in '{place}'")
    return data


def _unpacked(archive: Path) -> Path:
    """The one folder inside an archive, in the cache."""
    target = cache_folder("corpora") / f"{archive.name.split('.')[0]}-{fingerprint(state_of(archive))}"
    with locked(target.with_suffix(".lock")):
        if not target.is_dir():
            fresh = Path(tempfile.mkdtemp(dir=target.parent))
            try:
                with tarfile.open(archive) as tar:
                    tar.extractall(fresh, filter="data")
            except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                shutil.rmtree(fresh)
                raise DataError(f"cannot unpack '{archive}': {error}") from error
            fresh.rename(target)  # whoever sees the folder sees all of it
    inside = [path for path in target.iterdir() if path.is_dir()]
    return inside[0] if len(inside) == 1 else target
