"""Output for people: tables that fit a terminal of 80 columns, sentences, short numbers."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def new_table(title: str, *, header: bool = True) -> Table:
    """An empty table without vertical lines, which would take room from the figures."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        show_header=header,
    )


def show(table: Table) -> None:
    """Print a table and an empty line.

    No name or figure is cut: a terminal that is too narrow for all columns gets the first ones, and is told the others.
    """
    console = Console(highlight=False)
    left_out: list[str] = []
    if table.show_header:
        while console.is_terminal and _width(table) > console.width and len(table.columns) > 1:
            left_out.insert(0, " ".join(str(table.columns.pop().header).split()))
        console.width = max(console.width, _width(table))
    console.print(table)
    if left_out:
        say(f"The terminal is too narrow for: {', '.join(left_out)}.")
    print()


def _width(table: Table) -> int:
    """Characters of the widest line."""
    unlimited = Console(width=10_000)
    return Measurement.get(unlimited, unlimited.options, table).maximum


def say(sentence: str) -> None:
    """Print a sentence, wrapped to the width of the terminal."""
    Console(highlight=False, markup=False).print(sentence)


def say_duration(measurements: int, seconds: float) -> None:
    """Say on stderr about how long a benchmark takes. Starting learners takes a second or two per measurement."""
    say_about(measurements * (seconds + 1.5), f"{measurements} measurements of {seconds:g} s")


def say_about(seconds: float, what: str) -> None:
    """Say on stderr, before the work begins, about how long it takes."""
    minutes = round(seconds / 60)
    length = f"{seconds:.0f} s" if seconds < 50 else f"{max(1, minutes)} minute{'s' if minutes > 1 else ''}"
    Console(stderr=True, highlight=False).print(f"{what}: about {length} on an idle machine")


def text(value: object) -> str:
    """A number in at most eight characters, a dash for None, other values as they are.

    >>> text(None), text(0.123456), text(65535.0), text(1234567), text(1.23456e-5)
    ('-', '0.1235', '65535', '1.23e+06', '1.23e-05')
    """
    if value is None:
        return "-"
    if not isinstance(value, int | float):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"
