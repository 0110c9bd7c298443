import gzip
import struct
import tarfile

import numpy as np
import pytest
import torch

from roundelay.errors import DataError
from roundelay.vision.fashion_mnist_files import FashionMnistData, find_fashion_mnist, idx_array

SIZES = {"train": 60_000, "t10k": 10_000}


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture(scope="module")
def contents():
    """Files of the right sizes: image i is i mod 256 everywhere, its class is i mod 10."""
    files = {}
    for part, size in SIZES.items():
        numbers = np.arange(size)
        files[f"{part}-images-idx3-ubyte"] = idx(np.broadcast_to((numbers % 256)[:, None, None], (size, 28, 28)))
        files[f"{part}-labels-idx1-ubyte"] = idx(numbers % 10)
    return files


def write(folder, contents, *, compressed):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content, 1) if compressed else content)
    return folder


def archive(path, folder):
    with tarfile.open(path, "w") as tar:
        tar.add(folder, "fashion_mnist")
    return path


def check(data):
    assert (len(data.train), len(data.valid), len(data.test)) == (55_000, 5_000, 10_000)
    assert data.train.images.shape == (55_000, 1, 28, 28)
    assert data.train.images.dtype == torch.uint8
    assert torch.equal(data.train.labels, torch.arange(55_000) % 10)
    assert torch.equal(data.valid.labels, torch.arange(55_000, 60_000) % 10)
    assert torch.equal(data.valid.images[:, 0, 3, 5], (torch.arange(55_000, 60_000) % 256).to(torch.uint8))


@pytest.mark.parametrize("below", [".", "fashion_mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("compressed", [True, False])
def test_unpacked_files_are_found_in_the_usual_folders(tmp_path, contents, below, compressed):
    write(tmp_path / below, contents, compressed=compressed)
    check(FashionMnistData.load(tmp_path))


def test_an_archive_is_read_by_its_name_its_folder_and_the_environment(tmp_path, contents, monkeypatch):
    path = archive(tmp_path / "fashion_mnist.tar", write(tmp_path / "elsewhere" / "x", contents, compressed=True))
    check(FashionMnistData.load(path))
    check(FashionMnistData.load(str(tmp_path)))
    monkeypatch.setenv("ROUNDELAY_DATA", str(tmp_path))
    check(FashionMnistData.load())


def test_without_a_path_the_error_says_what_to_do_and_where_to_get_the_data(tmp_path, monkeypatch):
    monkeypatch.delenv("ROUNDELAY_DATA", raising=False)
    with pytest.raises(DataError, match=r"--data.*\$ROUNDELAY_DATA.*zalandoresearch/fashion-mnist"):
        FashionMnistData.load()
    with pytest.raises(DataError, match=r"no Fashion-MNIST in .*zalandoresearch/fashion-mnist"):
        find_fashion_mnist(tmp_path)


BROKEN = {
    "a wrong magic": (lambda good: b"\x00\x00\x0d\x03" + good[4:], "begins with 00 00 0d 03"),
    "another format": (lambda good: b"<html>", "begins with 3c 68 74 6d"),
    "nothing in it": (lambda good: b"", "not an idx file"),
    "a cut header": (lambda good: good[:6], "6 bytes"),
    "a cut file": (lambda good: good[:-1], "bytes, but its header says"),
    "too much": (lambda good: good + b"x", "bytes, but its header says"),
    "other images": (lambda good: idx(np.zeros((60_000, 14, 14))), r"shape \(60000, 14, 14\)"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_file_is_named_in_one_line(tmp_path, contents, kind):
    damage, message = BROKEN[kind]
    name = "train-images-idx3-ubyte"
    write(tmp_path, contents | {name: damage(contents[name])}, compressed=False)
    with pytest.raises(DataError, match=message) as raised:
        FashionMnistData.load(tmp_path)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_class_above_nine_is_refused(tmp_path, contents):
    labels = np.full(60_000, 12)
    write(tmp_path, contents | {"train-labels-idx1-ubyte": idx(labels)}, compressed=False)
    with pytest.raises(DataError, match="class 12"):
        FashionMnistData.load(tmp_path)


def test_a_missing_file_is_named(tmp_path, contents):
    write(tmp_path, contents, compressed=False)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte"):
        FashionMnistData.load(tmp_path)
    archive(tmp_path / "cut.tar", tmp_path)
    with pytest.raises(DataError, match=r"cut\.tar has no t10k-labels-idx1-ubyte"):
        FashionMnistData.load(tmp_path / "cut.tar")


def test_damaged_compression_and_damaged_archives_are_named(tmp_path, contents):
    write(tmp_path, contents, compressed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is damaged"):
        FashionMnistData.load(tmp_path)
    with pytest.raises(DataError, match="not a tar archive"):
        FashionMnistData.load(path)


def test_arrays_of_any_number_of_axes_are_read():
    array = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5), dtype=np.uint8)
    assert np.array_equal(idx_array(idx(array), "x"), array)
