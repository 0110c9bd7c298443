"""Reads the folders of runs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roundelay.errors import RoundelayError, UsageError, described
from roundelay.reports.pages.run import Run, first_number
from roundelay.training.metrics import Row, read_rows
from roundelay.training.recipes import read_toml

log = logging.getLogger("roundelay")

METRICS = "metrics*.jsonl"


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, each once, with names that are all different.

    Raises UsageError if a folder is missing or holds no run, RoundelayError if a file in it cannot be read.
    """
    distinct = list({folder.resolve(): folder for folder in folders}.values())
    for folder in distinct:
        _check(folder)
    return [_read(folder, name) for folder, name in zip(distinct, names(distinct), strict=True)]


def _check(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not there"
        raise UsageError(f"'{folder}' {what}; a report needs the folder of a run, as `roundelay train --out` makes it")
    if not _is_run(folder):
        inside = [str(each) for each in sorted(folder.iterdir()) if each.is_dir() and _is_run(each)]
        hint = f"did you mean {' '.join(inside[:4])}?" if inside else "`roundelay train --out` makes one"
        raise UsageError(f"no run in '{folder}': it has no config.toml and no metrics.jsonl; {hint}")


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() or any(folder.glob(METRICS))


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of these paths that are all different.

    >>> names([Path("/a/x"), Path("/b/x")]), names([Path("/a/x"), Path("/a/y")])
    (['a/x', 'b/x'], ['x', 'y'])
    """
    parts = [folder.resolve().parts for folder in folders]
    ends: list[str] = []
    for length in range(1, max(map(len, parts), default=0) + 1):
        ends = ["/".join(each[-length:]) for each in parts]
        if len(set(ends)) == len(ends):
            break
    return ends


def _read(folder: Path, name: str) -> Run:
    config = folder / "config.toml"
    machine, results = _json(folder / "machine.json"), _json(folder / "results.json")
    simulated = bool(machine.get("simulated") or results.get("simulated"))
    run = Run(
        f"{name} (simulated)" if simulated else name,
        config=read_toml(config) if config.is_file() else {},
        machine=machine,
        results=results,
        simulated=simulated,
        words={
            path.stem.removeprefix("evaluation-"): found
            for path in sorted(folder.glob("evaluation-*.json"))
            if "wer" in (found := _json(path))
        },
    )
    added = sum(run.add(row) for row in _rows(folder))
    lines = sum(bool(line.strip()) for path in folder.glob(METRICS) for line in path.read_bytes().splitlines())
    if added < lines:
        log.warning(
            "'%s': %d of %d lines of the metrics are no rows of a run; they are left out", folder, lines - added, lines
        )
    run.events.sort(key=_time)
    run.learners = dict(sorted(run.learners.items()))
    return run


def _json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; empty if the file is missing or damaged. A warning names a damaged file."""
    try:
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
        reason = "it holds no JSON object"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = described(error)
    log.warning("'%s' cannot be read and is left out: %s", path, reason)
    return {}


def _rows(folder: Path) -> Iterator[Row]:
    """Rows of all metrics files, the file that begins earliest first: a learner may continue in another machine's file."""
    try:
        for path in sorted(folder.glob(METRICS), key=_begins):
            yield from read_rows(path)
    except OSError as error:
        raise RoundelayError(f"cannot read the metrics in '{folder}': {error}") from error


def _begins(path: Path) -> tuple[float, str]:
    return _time(next(read_rows(path), {})), path.name


def _time(row: Row) -> float:
    """Time of a row as a sort key; a row without a time comes last."""
    return first_number(row.get("elapsed_s"), math.inf)
