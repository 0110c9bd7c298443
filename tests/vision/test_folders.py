import json
import os

import pytest

from roundelay.errors import DataError
from roundelay.vision.folders import ClassFolder

DAMAGED = {"n01/n01_003.JPEG", "n01/n01_004.JPEG", "n02/n02_005.JPEG", "n03/n03_011.JPEG"}


def test_files_are_listed_by_class_and_name_and_others_are_counted(imagenet):
    folder = ClassFolder(imagenet / "train")
    assert folder.classes == ["n01", "n02", "n03"]
    assert len(folder) == 37
    assert folder.files == sorted(folder.files)
    assert folder.labels == [0] * 12 + [1] * 13 + [2] * 12
    assert folder.not_images == 3
    assert folder.unreadable == 0


def test_grey_cmyk_and_palette_images_come_as_rgb(imagenet):
    folder = ClassFolder(imagenet / "train")
    for name in ("n02_006.JPEG", "n02_007.JPEG", "n02_008.png"):
        image = folder.image(folder.files.index(f"n02/{name}"))
        assert image.mode == "RGB"


def test_damaged_files_are_skipped_named_once_and_counted_once(imagenet, caplog):
    folder = ClassFolder(imagenet / "train")
    for _ in range(2):
        found = {
            name for name, sample in zip(folder.files, range(len(folder)), strict=True) if not folder.image(sample)
        }
        assert found == DAMAGED
    assert folder.unreadable == 4
    assert sorted(record.args[0] for record in caplog.records) == sorted(DAMAGED)


def test_the_next_readable_file_replaces_an_unreadable_one_with_its_own_label(imagenet):
    folder = ClassFolder(imagenet / "train")
    place = {name: sample for sample, name in enumerate(folder.files)}
    for damaged, instead in [("n01/n01_003.JPEG", "n01/n01_005.JPEG"), ("n03/n03_011.JPEG", "n01/n01_000.JPEG")]:
        image, label = folder.readable(place[damaged])
        expected = folder.image(place[instead])
        assert image.tobytes() == expected.tobytes()
        assert label == folder.labels[place[instead]]


def test_a_missing_disk_is_an_error_and_not_an_endless_search(imagenet):
    folder = ClassFolder(imagenet / "train")
    imagenet.rename(imagenet.with_name("gone"))
    with pytest.raises(DataError, match="cannot read 37 images in a row"):
        folder.readable(5)


def test_the_list_comes_from_the_cache_until_a_folder_changes(imagenet, cache, monkeypatch):
    before = ClassFolder(imagenet / "val").files
    (entry,) = cache.glob("images-*.json")
    listed = []
    scandir = os.scandir
    monkeypatch.setattr("roundelay.vision.folders.os.scandir", lambda path: listed.append(str(path)) or scandir(path))
    assert ClassFolder(imagenet / "val").files == before
    assert listed == [str(imagenet / "val")], "the class folders are not listed again"
    (imagenet / "val" / "n01" / "n01_zzz.png").write_bytes(b"")
    assert ClassFolder(imagenet / "val").files == sorted([*before, "n01/n01_zzz.png"])
    entry.write_text("{ torn")
    assert len(ClassFolder(imagenet / "val")) == len(before) + 1
    assert json.loads(entry.read_text())["classes"] == ["n01", "n02", "n03"]


def test_the_cache_is_where_roundelay_cache_says(imagenet, tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "elsewhere"))
    ClassFolder(imagenet / "train")
    assert list((tmp_path / "elsewhere").glob("images-*.json"))


def test_a_cache_that_cannot_be_written_is_only_a_warning(imagenet, cache, caplog):
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("a file where the folder should be")
    assert len(ClassFolder(imagenet / "val")) == 18
    assert "cannot write the list of images" in caplog.text


def test_folders_without_classes_or_images_are_refused(tmp_path, cache):
    with pytest.raises(DataError, match="one folder per class"):
        ClassFolder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no folders"):
        ClassFolder(tmp_path / "empty")
    (tmp_path / "empty" / "n01").mkdir()
    with pytest.raises(DataError, match="no image in the folders"):
        ClassFolder(tmp_path / "empty")
