"""Images in class folders, as ImageNet has them: DIR/train/<class>/*.JPEG and DIR/val/<class>/*.JPEG."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roundelay.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger("roundelay")

EXTENSIONS = frozenset({".jpeg", ".jpg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff"})
GIVE_UP_AFTER = 100  # unreadable files in a row: then it is not the files


class ClassFolder:
    """One folder per class, and the images in them, numbered by class and name.

    The list of files is kept in a cache and made again when a folder has changed. A file that cannot be decoded
    costs nothing but a warning: its neighbour stands in for it, and it is counted.

    Attributes:
        classes: the names of the folders, in order; a label is a position among them.
        files: the images, relative to `root`.
        labels: the class of each.
        not_images: how many files were left out because their names are not those of images.

    Raises DataError if `root` is no folder with class folders in it, or they hold no image.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser()
        index = _index(self.root)
        self.classes: list[str] = index["classes"]
        self.not_images: int = index["not_images"]
        self.files = [
            f"{name}/{file}" for name, files in zip(self.classes, index["files"], strict=True) for file in files
        ]
        self.labels = [label for label, files in enumerate(index["files"]) for _ in files]
        if not self.files:
            raise DataError(f"no image in the folders of {self.root}; known are {', '.join(sorted(EXTENSIONS))}")
        # One byte per file, shared with worker processes: they mark, whoever asks counts, and marking twice is no harm.
        self._unreadable = torch.zeros(len(self.files), dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return len(self.files)

    @property
    def unreadable(self) -> int:
        """How many different files could not be decoded so far, here or in a worker process."""
        return int(self._unreadable.sum(dtype=torch.int64))

    def image(self, sample: int) -> Image | None:
        """The image in RGB, or None if it cannot be decoded."""
        try:
            return decoded(self.root / self.files[sample])
        except MissingExtraError:
            raise
        except Exception as error:  # decoders raise whatever they like on damaged files; none of it is ours
            if not self._unreadable[sample]:
                self._unreadable[sample] = 1
                log.warning("cannot read image %s: %s", self.files[sample], error)
            return None

    def readable(self, sample: int) -> tuple[Image, int]:
        """An image and its label: that of `sample` or, if it cannot be decoded, of the next one that can.

        Raises DataError after GIVE_UP_AFTER unreadable files in a row.
        """
        for step in range(min(GIVE_UP_AFTER, len(self))):
            candidate = (sample + step) % len(self)
            image = self.image(candidate)
            if image is not None:
                return image, self.labels[candidate]
        raise DataError(
            f"none of {min(GIVE_UP_AFTER, len(self))} images in a row from {self.root / self.files[sample]} on can be read; "
            "is the disk still there?"
        )


def decoded(path: Path) -> Image:
    """An image file as RGB; whatever Pillow raises if it is none."""
    try:
        from PIL.Image import open as opened
    except ImportError as error:
        raise MissingExtraError("reading images", "vision") from error
    with opened(path) as image:
        return image.convert("RGB")


def _index(root: Path) -> dict[str, Any]:
    """Classes, files of each and the number of other files; from the cache, unless a folder has changed since."""
    state = _state(root)
    cache = _cache_file(root)
    try:
        cached: dict[str, Any] = json.loads(cache.read_text())
    except (OSError, ValueError):
        cached = {}
    if cached.get("state") == state:
        return cached
    index: dict[str, Any] = {"state": state, "classes": [name for name, _ in state], "files": [], "not_images": 0}
    for name in index["classes"]:
        files = sorted(_files(root / name))
        images = [file for file in files if Path(file).suffix.lower() in EXTENSIONS]
        index["files"].append(images)
        index["not_images"] += len(files) - len(images)
    _store(cache, index)
    return index


def _state(root: Path) -> list[list[Any]]:
    """Name and time of the last change of every class folder: a file that comes or goes changes its folder's."""
    try:
        state = sorted([entry.name, entry.stat().st_mtime_ns] for entry in os.scandir(root) if entry.is_dir())
    except OSError as error:
        raise DataError(
            f"cannot read the folder {root}: {error.strerror}; it should hold one folder per class"
        ) from error
    if not state:
        raise DataError(f"{root} has no folders in it; it should hold one folder per class, with its images")
    return state


def _files(folder: Path) -> Iterator[str]:
    return (entry.name for entry in os.scandir(folder) if entry.is_file())


def _cache_file(root: Path) -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    return caches / "roundelay" / f"images-{key}.json"


def _store(cache: Path, index: dict[str, Any]) -> None:
    """Atomically, for learners of one machine do this at the same time; a cache that cannot be written is only slow."""
    partial = cache.with_suffix(f".{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(index))
        partial.replace(cache)
    except OSError as error:
        log.warning("cannot keep the list of images in %s: %s", cache, error)
