"""Reading text files: tables, transcripts, lexicons, language models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from roundelay.errors import DataError


def lines_of(path: str | Path) -> Iterator[str]:
    """The lines of a file in UTF-8, without line ends and byte order mark. Raises DataError for another encoding."""
    with Path(path).open(encoding="utf-8-sig") as lines:
        try:
            for line in lines:
                yield line.removesuffix("\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"'{path}' is not in UTF-8: it has the byte {error.object[error.start]:#04x}; convert it, for instance: "
                f"iconv -f LATIN1 -t UTF-8 {path}"
            ) from None
