"""Values of options: numbers with units, and the default directory of a run."""

from __future__ import annotations

import argparse
import re

import pytest

from roundelay.cli.arguments import bandwidth, byte_count, dated_folder, duration, number, output_path, positive_int


@pytest.mark.parametrize(("text", "value"), [("165MB", 165e6), ("4G", 4e9), ("2.5 KB", 2500), ("1e6", 1e6)])
def test_sizes(text, value):
    assert byte_count(text) == value


@pytest.mark.parametrize(("text", "value"), [("10Gb/s", 1.25e9), ("1.25GB/s", 1.25e9), ("8 Mbit", 1e6)])
def test_bandwidths_in_bits_and_bytes(text, value):
    assert bandwidth(text) == value


@pytest.mark.parametrize(("text", "value"), [("0.3", 0.3), ("300ms", 0.3), ("5us", 5e-6), ("5µs", 5e-6), ("2 s", 2)])
def test_durations(text, value):
    assert duration(text) == pytest.approx(value)


@pytest.mark.parametrize("reader", [bandwidth, byte_count, duration, number, positive_int])
@pytest.mark.parametrize("text", ["", "x", "-1", "1e", "nan", "inf", "1 2"])
def test_other_text_is_refused_with_what_came(reader, text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}'"):
        reader(text)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("an4", "an4"), ("an4/best", "an4-best"), ("some/mine.toml", "mine"), ("my.tasks:Mine", "my.tasks")],
)
def test_the_default_directory_of_a_run_has_the_name_of_its_recipe(recipe, name):
    folder = dated_folder(recipe, "simulated-")
    assert folder.parent.name == "runs"
    assert re.fullmatch(rf"simulated-{re.escape(name)}-\d{{8}}-\d{{6}}", folder.name)


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"cannot write '.*folder.svg': Is a directory; choose another"
    ):
        output_path(str(tmp_path / "folder.svg"))


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_was(tmp_path):
    old, new = tmp_path / "old.svg", tmp_path / "new.svg"
    old.write_text("a picture")
    assert [output_path(str(old)), output_path(str(new))] == [old, new]
    assert old.read_text() == "a picture"
    assert not new.exists()
