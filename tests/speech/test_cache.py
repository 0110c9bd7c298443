"""Corpora are found by path or environment variable; archives are unpacked once and completely."""

from __future__ import annotations

import tarfile
import threading
import time

import pytest

from roundelay.errors import DataError
from roundelay.speech.cache import cache_folder, find_corpus, locked


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ROUNDELAY_DATA", raising=False)
    (tmp_path / "an4").mkdir()
    (tmp_path / "an4" / "MANIFEST.tsv").write_text("path\ttext\n")
    return tmp_path


def archive(home, name="an4.tar.xz"):
    (home / "data").mkdir()
    with tarfile.open(home / "data" / name, "w:xz" if name.endswith("xz") else "w") as tar:
        tar.add(home / "an4", "an4")
    return home / "data" / name


@pytest.mark.parametrize("name", ["an4.tar.xz", "an4.tar"])
def test_an_archive_is_found_and_unpacked_once(home, monkeypatch, name):
    path = archive(home, name)
    monkeypatch.setenv("ROUNDELAY_DATA", str(path.parent))
    folder = find_corpus("an4")
    assert (folder / "MANIFEST.tsv").read_text() == "path\ttext\n"
    monkeypatch.setattr(tarfile, "open", None)
    assert find_corpus("an4") == find_corpus("an4", path) == find_corpus("an4", path.parent) == folder


def test_a_folder_is_taken_as_it_is(home):
    assert find_corpus("an4", home) == find_corpus("an4", home / "an4") == home / "an4"


def test_missing_data_are_refused(home, monkeypatch):
    with pytest.raises(DataError, match="--data, or set ROUNDELAY_DATA"):
        find_corpus("an4")
    with pytest.raises(DataError, match=r"there is no '.*nowhere', which should have an4"):
        find_corpus("an4", home / "nowhere")
    monkeypatch.setenv("ROUNDELAY_DATA", str(home / "an4"))
    with pytest.raises(DataError, match="neither a folder 'fsdd' nor an archive"):
        find_corpus("fsdd")


def test_a_broken_archive_leaves_nothing_behind(home):
    path = archive(home)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot unpack"):
        find_corpus("an4", path)
    assert [entry.suffix for entry in cache_folder("corpora").iterdir()] == [".lock"]


def test_an_archive_cannot_write_outside_its_folder(home):
    (home / "data").mkdir()
    with tarfile.open(home / "data" / "an4.tar", "w") as tar:
        tar.add(home / "an4" / "MANIFEST.tsv", "../../evil.tsv")
    with pytest.raises(DataError, match="cannot unpack"):
        find_corpus("an4", home / "data" / "an4.tar")


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.delenv("ROUNDELAY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("a", "b") == tmp_path / "roundelay" / "a" / "b"


def test_only_one_process_is_inside_a_lock(tmp_path):
    inside, most = [], []

    def work():
        with locked(tmp_path / "x.lock"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 5
