"""Numbers with units."""

from __future__ import annotations

import argparse

import pytest

from roundelay.cli.arguments import bandwidth, byte_count, duration, number, positive_int


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
def test_anything_else_is_refused_in_words(reader, text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}'"):
        reader(text)
