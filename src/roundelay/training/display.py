"""The progress of a run: a live table on a terminal, plain lines elsewhere. It reads the metrics that learners write."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from roundelay.training.metrics import Row, rows_of

LINE_EVERY_S = 10.0  # between two lines when the output is no terminal
MOST_ROWS = 32  # with more learners, the table shows only every second, third, ... learner
_COLUMNS = ("learner", "steps", "samples/s", "loss", "staleness", "spread", "exch./step", "waits")
_WIDE = ("staleness", "spread", "exch./step")  # columns that a narrow terminal has no space for
NARROW = 76
ECHO = 2  # the terminal writes ^C behind the last line; the line must not wrap, or it is not erased


class Display:
    """Shows the metrics that learners write after construction. The caller calls `update` a few times a second.

    Args:
        path: the metrics file. Rows already in the file belong to an earlier part of the run and are not shown.
        learners: number of learners that begin the run.
        console: by default standard error.

    Attributes:
        elapsed_s: duration of the run so far.
        samples_seen: samples that all learners have used so far.
    """

    def __init__(self, path: Path, learners: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._path, self._pending = path, ""
        self._offset = path.stat().st_size if path.exists() else 0
        self._rows: dict[int, Row] = {}
        self._gone: dict[int, str] = {}
        self._learners = learners
        self._evaluation = ""
        self.elapsed_s, self.samples_seen = 0.0, 0
        self._last_line = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        self._bar = self._progress.add_task("starting learners", total=None)
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=False)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.update()
        if self._console.is_terminal:
            self._live.stop()

    def say(self, sentence: str) -> None:
        """Print a line above the table."""
        self._console.print(sentence, markup=False, soft_wrap=True)

    def gone(self, learner: int, how: str) -> None:
        """Show that a learner was lost, and how, until it writes a row again."""
        self._gone[learner] = how

    def update(self) -> None:
        """Read the new rows, and show them."""
        for row in self._new_rows():
            self.elapsed_s = max(self.elapsed_s, row.get("elapsed_s", 0.0))
            self.samples_seen = max(self.samples_seen, row.get("samples_seen", 0))
            if row["kind"] == "learner":
                self._rows[row["learner"]] = {**self._rows.get(row["learner"], {}), **row}
                self._gone.pop(row["learner"], None)
                epochs = f"{row['samples_seen']:,} of {row['total']:,} samples"
                self._progress.update(self._bar, completed=row["samples_seen"], total=row["total"], description=epochs)
            elif row["kind"] == "evaluation":
                self._evaluation = _evaluation_text(row)
                if not self._console.is_terminal:
                    self.say(self._evaluation)
        if not self._console.is_terminal and self._rows and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(self._line())

    def _new_rows(self) -> list[Row]:
        if not self._path.exists():
            return []
        with self._path.open(errors="replace") as file:
            file.seek(self._offset)
            text = self._pending + file.read()
            self._offset = file.tell()
        *lines, self._pending = text.split("\n")
        return list(rows_of(lines))

    def _line(self) -> str:
        rows = self._rows.values()
        samples_seen, total = max(row["samples_seen"] for row in rows), max(row["total"] for row in rows)
        losses = [row["loss"] for row in rows if "loss" in row]
        speed = sum(row.get("samples_per_s", 0.0) for row in rows)
        loss = f", loss {sum(losses) / len(losses):.4f}" if losses else ""
        return (
            f"{samples_seen:,} of {total:,} samples ({samples_seen / max(total, 1):.0%}), {speed:,.0f} samples/s{loss}"
        )

    def _render(self) -> Constrain:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=True)
        columns = [at for at, name in enumerate(_COLUMNS) if self._console.width >= NARROW or name not in _WIDE]
        for at in columns:
            table.add_column(_COLUMNS[at], justify="right", no_wrap=True)
        learners = sorted({*range(self._learners), *self._rows})
        for learner in learners[:: -(-len(learners) // MOST_ROWS)]:
            cells = self._cells(learner)
            table.add_row(*(cells[at] for at in columns))
        return Constrain(Group(table, Text(self._evaluation), self._progress), self._console.width - ECHO)

    def _cells(self, learner: int) -> list[str]:
        if learner in self._gone:
            return [str(learner), self._gone[learner], *[""] * (len(_COLUMNS) - 2)]
        row = self._rows.get(learner, {})
        waits = row["wait_s"] / row["step_s"] if row.get("step_s") else None
        return [
            str(learner),
            _number(row.get("steps"), ",.0f"),
            _number(row.get("samples_per_s"), ",.0f"),
            _number(row.get("loss"), ".4f"),
            _number(row.get("staleness_mean"), ".2f"),
            _number(row.get("spread"), ".4f"),
            _number(row.get("exchanges_per_step"), ".2f"),
            _number(waits, ".0%"),
        ]


def _number(value: Any, form: str) -> str:  # noqa: ANN401
    return "-" if value is None else format(value, form)


def _evaluation_text(row: Row) -> str:
    known = ("kind", "split", "samples_seen", "elapsed_s", "samples")
    figures = ", ".join(f"{name} {value:.4f}" for name, value in row.items() if name not in known)
    return f"mean model after {row['samples_seen']:,} samples, {row['elapsed_s']:.0f} s: {row['split']} {figures}"
