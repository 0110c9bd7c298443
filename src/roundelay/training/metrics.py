"""The metrics of a run: one JSON object per line, for every learner, evaluation and event.

Every row has `kind`, `elapsed_s` (seconds of the run) and `samples_seen` (samples that all learners have used):
  learner      the state of one learner: learner, total (samples in the run), samples (its own), loss, lr, samples_per_s,
               skipped (steps without a finite gradient), and the figures of `Learner.metrics` (steps, wait_s, ...)
  evaluation   the mean model: split, samples (in the split), loss and the other figures of the task
  event        something that happened: event, learner, reason
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from roundelay.errors import MissingExtraError

log = logging.getLogger("roundelay")

Row = dict[str, Any]


class Sink(Protocol):
    """A destination of rows."""

    def write(self, row: Row) -> None:
        """Write one row."""

    def close(self) -> None:
        """Release the files. Do not call `write` afterwards."""


class JsonLines:
    """Appends JSON values to a file, one per line. Several processes may share it: every line is one write.

    On a full disk a line is lost or cut off, which is logged, and training goes on.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._path, self._lost = path, 0
        self._cut_off = False

    def write(self, row: Row | int) -> None:
        """Append one line. Never raises OSError."""
        line = ("\n" * self._cut_off + json.dumps(row) + "\n").encode()
        try:
            written = os.write(self._fd, line)
            reason = "no space left"
        except OSError as error:
            written, reason = 0, str(error.strerror)
        self._cut_off = 0 < written < len(line) or (self._cut_off and not written)
        if written < len(line):
            if not self._lost:
                log.error("cannot write to '%s': %s; rows are lost until there is space", self._path, reason)
            self._lost += 1
        elif self._lost:
            log.warning("writing to '%s' again; %d rows are lost", self._path, self._lost)
            self._lost = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class TensorBoard:
    """Writes TensorBoard's event files. The step of a value is `samples_seen`.

    Raises MissingExtraError if tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("TensorBoard output", "tensorboard") from None
        self._writer = SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        """Write every number of the row."""
        prefix = row.get("split", row["kind"])
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("samples_seen", "learner"):
                self._writer.add_scalar(f"{prefix}/{name}", value, row["samples_seen"])

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file. Lines that are no row, such as one that a crash has cut off or damaged, are left out."""
    with path.open(errors="replace") as file:
        yield from rows_of(file)


def rows_of(lines: Iterable[str]) -> Iterator[Row]:
    """The rows of these lines. Lines that are no row are left out."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and "kind" in row:
                yield row


class Meter:
    """Writes the rows of one learner, and measures loss and speed between them.

    Args:
        sinks: where rows go.
        every_s: seconds between rows of this learner.
        now: the clock, in seconds.
    """

    def __init__(self, sinks: Sequence[Sink], every_s: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._sinks, self._every_s, self._now = sinks, every_s, now
        self._loss, self._steps, self._samples = 0.0, 0, 0
        self._window_began = now()
        self._reported = False
        self.start_clock(0.0)

    def start_clock(self, elapsed_s: float) -> None:
        """Count the seconds of the run from now, beginning with `elapsed_s`."""
        self._run_began = self._now() - elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run so far."""
        return self._now() - self._run_began

    def add(self, loss: float, samples: int) -> None:
        """Count one step. A loss that is not finite is left out of the mean."""
        if math.isfinite(loss):
            self._loss += loss
            self._steps += 1
        self._samples += samples

    def due(self) -> bool:
        """Whether `every_s` seconds have passed since the last `window`."""
        return self._now() - self._window_began >= self._every_s

    def window(self) -> Row:
        """The mean loss and the speed since the last call."""
        now = self._now()
        row: Row = {"samples_per_s": self._samples / max(now - self._window_began, 1e-9)}
        if self._steps:
            row["loss"] = self._loss / self._steps
        self._loss, self._steps, self._samples = 0.0, 0, 0
        self._window_began = now
        self._reported = True
        return row

    def last_window(self) -> Row:
        """What `window` gives, if the run was shorter than one window; else nothing.

        A last window is short, or contains the wait for other learners. Its speed would look like a sudden change.
        """
        return {} if self._reported else self.window()

    def write(self, row: Row) -> None:
        """Write a row, with `elapsed_s`, to every sink."""
        for sink in self._sinks:
            sink.write(row | {"elapsed_s": self.elapsed_s})

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()
