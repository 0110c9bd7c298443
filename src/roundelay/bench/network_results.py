"""A file with the rows of `roundelay bench network`, which may be measured piece by piece."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roundelay.bench.network import Row, Settings, compared
from roundelay.errors import RoundelayError

SHARED = ("compute", "learners", "every", "slow", "parameters", "step_s")
"""Settings that all rows of a file have in common."""


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def add(path: Path, settings: Settings, rows: Sequence[Row], piece: Mapping[str, Any]) -> list[Row]:
    """Write rows to a file, in place of older ones of the same rate, strategy and seed; returns all its rows.

    A row that was measured together with no communication or with DDP stays compared with those.

    Args:
        path: the file; made if it is not there.
        settings: what was measured.
        rows: the new ones.
        piece: the command and the machine; a file lists all that its rows were made with.

    Raises RoundelayError if the file has rows with other settings.
    """
    shared = {name: getattr(settings, name) for name in SHARED}
    document: dict[str, Any] = {"settings": shared, "rows": [], "pieces": []}
    if path.exists():
        document = json.loads(path.read_text())
        if document["settings"] != shared:
            raise RoundelayError(f"{path} has rows with {document['settings']}, not with {shared}; name another file")
    merged = {(row.rate, row.strategy, row.seed): row for row in [*(Row(**row) for row in document["rows"]), *rows]}
    found = compared(list(merged.values()))
    document["rows"] = [dataclasses.asdict(row) for row in found]
    document["pieces"].append(piece)
    path.write_text(json.dumps(document, indent=2) + "\n")
    return found
