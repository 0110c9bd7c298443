"""Tables for people: they fit a terminal of 80 columns."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def new_table(title: str, *, header: bool = True) -> Table:
    """A table without vertical lines, which leaves the room to the figures."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        show_edge=False,
        show_header=header,
    )


def show(table: Table) -> None:
    """Print it, and an empty line."""
    Console(highlight=False).print(table)
    print()


def text(value: object) -> str:
    """A figure with four digits; a dash for what does not exist.

    >>> text(None), text(0.123456), text(12), text(1234567.0)
    ('-', '0.1235', '12', '1.235e+06')
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
