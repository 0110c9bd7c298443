"""Reading Fashion-MNIST (Xiao et al. 2017): four idx files, in an archive or a folder, compressed or not."""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from roundelay.errors import DataError

DATA_VARIABLE = "ROUNDELAY_DATA"
OFFICIAL_SOURCE = "https://github.com/zalandoresearch/fashion-mnist"
ARCHIVE = "fashion_mnist.tar"
# Searched below the given folder; the last is torchvision's.
FOLDERS = (".", "fashion_mnist", "fashion-mnist", "FashionMNIST/raw")
UNSIGNED_BYTES = 0x08  # the only idx type in MNIST and Fashion-MNIST

ReadFile = Callable[[str], bytes]


@dataclass(frozen=True)
class Labelled:
    """Images as bytes (N, C, H, W), and the class number of each."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: slice) -> Labelled:
        return Labelled(self.images[which], self.labels[which])


@dataclass(frozen=True)
class FashionMnistData:
    """60,000 training and 10,000 test images of 28 x 28 grey pixels, in 10 classes.

    The last 5,000 training images are for validation: hyperparameters are tuned on them, and the test images are used only for
    the final figure.
    """

    train: Labelled
    valid: Labelled
    test: Labelled
    VALID: ClassVar[int] = 5000

    @classmethod
    def load(cls, path: str | Path | None = None) -> FashionMnistData:
        """Read an archive, or a folder with the archive or the idx files; by default in $ROUNDELAY_DATA.

        Raises DataError if files are missing or damaged; the message says where to get them.
        """
        read = find_fashion_mnist(path)
        train = _labelled(read, "train", 60_000)
        return cls(train[: -cls.VALID], train[-cls.VALID :], _labelled(read, "t10k", 10_000))


def idx_array(content: bytes, name: str) -> np.ndarray:
    """The array in an idx file: two zero bytes, the type, the number of axes, their lengths (big-endian), the values.

    >>> idx_array(bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 3, 7, 8, 9]), "example")
    array([[7, 8, 9]], dtype=uint8)
    """
    if content[:3] != bytes([0, 0, UNSIGNED_BYTES]) or len(content) < 4:
        raise DataError(f"{name} is not an idx file of bytes: it begins with {content[:4].hex(' ')}, not with 00 00 08")
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, offset=4).tolist() if len(content) >= 4 + 4 * axes else [0]
    expected = 4 + 4 * axes + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        raise DataError(f"{name} has {len(content)} bytes, but its header says {expected}; download it again")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _labelled(read: ReadFile, part: str, count: int) -> Labelled:
    images_name, labels_name = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    images, labels = idx_array(read(images_name), images_name), idx_array(read(labels_name), labels_name)
    for name, array, shape in ((images_name, images, (count, 28, 28)), (labels_name, labels, (count,))):
        if array.shape != shape:
            raise DataError(f"{name} has shape {array.shape}, expected {shape}; get it from {OFFICIAL_SOURCE}")
    if labels.max() > 9:
        raise DataError(f"{labels_name} has class {labels.max()}; Fashion-MNIST's classes are 0 to 9")
    return Labelled(torch.from_numpy(images.copy()).unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))


def find_fashion_mnist(path: str | Path | None = None) -> ReadFile:
    """A function that reads one of the four files by name, from `path` or a folder below it (default: $ROUNDELAY_DATA).

    Raises DataError if the files are not there; the message says where to get them.
    """
    location = _location(path)
    if location.is_file():
        return _archive_reader(location)
    for folder in (location / below for below in FOLDERS):
        if _candidates(folder, "train-images-idx3-ubyte"):
            return partial(_read_from_folder, folder)
    if (location / ARCHIVE).is_file():
        return _archive_reader(location / ARCHIVE)
    raise DataError(
        f"no Fashion-MNIST in {location}; put {ARCHIVE} there, or train-images-idx3-ubyte.gz and the other three files "
        f"from {OFFICIAL_SOURCE}"
    )


def _location(path: str | Path | None) -> Path:
    named = str(path or "") or os.environ.get(DATA_VARIABLE, "")
    if not named:
        raise DataError(
            f"Fashion-MNIST is not found: give a path (--data) or set ${DATA_VARIABLE} to a folder with {ARCHIVE} "
            f"or with the four idx files from {OFFICIAL_SOURCE}"
        )
    return Path(named).expanduser()


def _candidates(folder: Path, name: str) -> list[Path]:
    return [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]


def _read_from_folder(folder: Path, name: str) -> bytes:
    found = _candidates(folder, name)
    if not found:
        raise DataError(f"{folder} has no {name} and no {name}.gz; get it from {OFFICIAL_SOURCE}")
    return _inflated(found[0].read_bytes(), name)


def _archive_reader(archive: Path) -> ReadFile:
    try:
        with tarfile.open(archive) as tar:
            members = {Path(member.name).name: member for member in tar.getmembers() if member.isfile()}
    except tarfile.TarError as error:
        raise DataError(
            f"{archive} is not a tar archive ({error}); give {ARCHIVE} or a folder with the idx files"
        ) from error

    def read(name: str) -> bytes:
        member = members.get(name) or members.get(f"{name}.gz")
        if member is None:
            raise DataError(f"{archive} has no {name} and no {name}.gz; get it from {OFFICIAL_SOURCE}")
        with tarfile.open(archive) as tar:
            file = tar.extractfile(member)
            assert file is not None
            return _inflated(file.read(), name)

    return read


def _inflated(content: bytes, name: str) -> bytes:
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise DataError(f"{name}.gz is damaged ({error}); download it again from {OFFICIAL_SOURCE}") from error
