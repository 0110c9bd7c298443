"""Images in class folders, such as ImageNet's: DIR/train/<class>/*.JPEG and DIR/val/<class>/*.JPEG."""

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
GIVE_UP_AFTER = 100  # unreadable files in a row; the disk is then probably broken, not the files


class ClassFolder:
    """The images in a folder of class folders, sorted by class and name.

    The list of files is cached, and made again if a folder has changed. A file that cannot be decoded is logged and counted, and
    `readable` returns the next image instead.

    Attributes:
        classes: sorted names of the folders; a label is an index into this list.
        files: paths of the images, relative to `root`.
        labels: the label of each image.
        not_images: number of files that are left out because of their extension.

    Raises DataError if `root` has no class folders, or if they have no images.
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
            raise DataError(
                f"no image in the folders of {self.root}; known extensions are {', '.join(sorted(EXTENSIONS))}"
            )
        # One byte per file, shared with worker processes. They only ever set bytes to 1, so no lock is needed.
        self._unreadable = torch.zeros(len(self.files), dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return len(self.files)

    @property
    def unreadable(self) -> int:
        """Number of different files that could not be decoded so far, in this process or in a worker process."""
        return int(self._unreadable.sum(dtype=torch.int64))

    def image(self, sample: int) -> Image | None:
        """The image in RGB, or None if it cannot be decoded."""
        try:
            return decoded(self.root / self.files[sample])
        except MissingExtraError:
            raise
        except Exception as error:  # decoders raise many kinds of errors for damaged files
            if not self._unreadable[sample]:
                self._unreadable[sample] = 1
                log.warning("cannot read image %s: %s", self.files[sample], error)
            return None

    def readable(self, sample: int) -> tuple[Image, int]:
        """Image `sample` and its label. If it cannot be decoded, the next image that can.

        Raises DataError after GIVE_UP_AFTER unreadable files in a row.
        """
        for step in range(min(GIVE_UP_AFTER, len(self))):
            candidate = (sample + step) % len(self)
            image = self.image(candidate)
            if image is not None:
                return image, self.labels[candidate]
        raise DataError(
            f"cannot read {min(GIVE_UP_AFTER, len(self))} images in a row, beginning with {self.root / self.files[sample]}; "
            "check the disk"
        )


def decoded(path: Path) -> Image:
    """An image file as RGB. Raises an error of Pillow if it cannot be decoded."""
    try:
        from PIL.Image import open as opened
    except ImportError as error:
        raise MissingExtraError("reading images", "vision") from error
    with opened(path) as image:
        return image.convert("RGB")


def _index(root: Path) -> dict[str, Any]:
    """Classes, their files and the number of other files, from the cache unless a folder has changed since."""
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
    """Name and modification time of every class folder. The time changes when a file is added or removed."""
    try:
        state = sorted([entry.name, entry.stat().st_mtime_ns] for entry in os.scandir(root) if entry.is_dir())
    except OSError as error:
        raise DataError(
            f"cannot read the folder {root}: {error.strerror}; it should have one folder per class"
        ) from error
    if not state:
        raise DataError(f"{root} has no folders; it should have one folder per class, with images")
    return state


def _files(folder: Path) -> Iterator[str]:
    return (entry.name for entry in os.scandir(folder) if entry.is_file())


def _cache_file(root: Path) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    caches = Path(os.environ.get("ROUNDELAY_CACHE") or home / "roundelay")
    key = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    return caches / f"images-{key}.json"


def _store(cache: Path, index: dict[str, Any]) -> None:
    """Write the cache atomically, since several learners of a machine may write it at once. A failure is only logged."""
    partial = cache.with_suffix(f".{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(index))
        partial.replace(cache)
    except OSError as error:
        log.warning("cannot write the list of images to %s: %s", cache, error)
