"""Values of options: text in, checked numbers out; what is wrong is said in the words of the option."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

PICTURES = (".svg", ".png", ".pdf")

_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "": 1.0}


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least 1, got '{text}'")
    return number


def output_path(text: str) -> Path:
    """Where a picture goes; its folder must be there."""
    path = Path(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"needs a file name that ends in {', '.join(PICTURES)}, got '{text}'")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write '{text}': there is no folder '{path.parent}'")
    return path


def byte_count(text: str) -> float:
    """Bytes with an optional decimal prefix: 165MB, 4G, 1000.

    >>> byte_count("165MB"), byte_count("1e6")
    (165000000.0, 1000000.0)
    """
    return _scaled(text, r"([KMGT]?)B?", _PREFIX, "a size such as 165MB")


def bandwidth(text: str) -> float:
    """Bytes a second from bits: 100Gb, 10Gb/s; or from bytes: 1.25GB/s.

    >>> bandwidth("10Gb/s"), bandwidth("1.25GB/s")
    (1250000000.0, 1250000000.0)
    """
    bits = re.fullmatch(r"(.*[0-9.]\s*[KMGT]?)b(?:it)?(?:/s)?", text)
    if bits:
        return byte_count(bits[1]) / 8
    return _scaled(text, r"([KMGT]?)B(?:/s)?", _PREFIX, "a bandwidth such as 100Gb/s or 1.25GB/s")


def duration(text: str) -> float:
    """Seconds: 0.3, 300ms, 5us.

    >>> duration("300ms"), duration("2")
    (0.3, 2.0)
    """
    return _scaled(text, r"(s|ms|us|µs|)", _SECONDS, "a time such as 300ms")


def number(text: str) -> float:
    """A number of at least 0."""
    return _scaled(text, "()", {"": 1.0}, "a number of at least 0")


def _scaled(text: str, unit: str, scale: dict[str, float], wanted: str) -> float:
    match = re.fullmatch(rf"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*{unit}\s*", text)
    if not match:
        raise argparse.ArgumentTypeError(f"needs {wanted}, got '{text}'")
    value = float(match[1]) * scale[match[2]]
    if value == float("inf"):
        raise argparse.ArgumentTypeError(f"needs {wanted}, got '{text}', which is too large")
    return value
