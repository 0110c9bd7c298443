"""Where metrics go: one JSON object per line, for every learner, evaluation and event of a run.

Rows have a `kind`:
  learner      one learner's state: learner, elapsed_s, place (samples of all learners), samples (its own), loss, lr,
               samples_per_s, skipped, and what `Learner.metrics` tells (steps, wait_s, spread, staleness_mean, ...)
  evaluation   the mean model: split, place, elapsed_s, samples, loss and the task's other figures
  event        something that happened: event, learner, elapsed_s, reason
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from roundelay.errors import MissingExtraError

Row = dict[str, Any]


class Sink(Protocol):
    """Takes rows."""

    def write(self, row: Row) -> None:
        """One row."""

    def close(self) -> None:
        """No more."""


class JsonLines:
    """Appends to a file that all learners of a machine share: a line is one write, so lines never mix."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, row: Row) -> None:
        """One line."""
        os.write(self._fd, (json.dumps(row) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class TensorBoard:
    """TensorBoard's event files: figures over the samples that all learners have used."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("TensorBoard output", "tensorboard") from None
        self._writer = SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        """Every number of the row."""
        prefix = row.get("split", row["kind"])
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("samples_seen", "learner"):
                self._writer.add_scalar(f"{prefix}/{name}", value, row["samples_seen"])

    def close(self) -> None:
        """Flush."""
        self._writer.close()


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file; a last line that was cut off by a crash is left out."""
    with path.open() as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "kind" in row:
                yield row


class Meter:
    """What happened since the last row, and when the next is due."""

    def __init__(self, sinks: list[Sink], every_s: float) -> None:
        self._sinks, self._every_s = sinks, every_s
        self._since: dict[str, float] = {}
        self._loss, self._steps, self._samples = 0.0, 0, 0
        self.restart("row")
        self.restart("posts")

    def add(self, loss: float, samples: int) -> None:
        """A step."""
        if math.isfinite(loss):
            self._loss += loss
            self._steps += 1
        self._samples += samples

    def elapsed(self, what: str) -> float:
        """Seconds since `restart(what)`."""
        return time.perf_counter() - self._since[what]

    def restart(self, what: str) -> None:
        """Count these seconds from now."""
        self._since[what] = time.perf_counter()

    def due(self) -> bool:
        """Whether it is time for a row."""
        return self.elapsed("row") >= self._every_s

    def window(self) -> Row:
        """The mean loss and the speed since the last row."""
        row: Row = {"samples_per_s": self._samples / max(self.elapsed("row"), 1e-9)}
        if self._steps:
            row["loss"] = self._loss / self._steps
        self._loss, self._steps, self._samples = 0.0, 0, 0
        self.restart("row")
        return row

    def write(self, row: Row) -> None:
        """To every sink."""
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        """No more rows."""
        for sink in self._sinks:
            sink.close()
