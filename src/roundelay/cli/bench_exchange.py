"""`roundelay bench exchange`: seconds of one exchange, beside the same bytes by plain sockets or memcpy."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import TYPE_CHECKING

from rich.console import Console

from roundelay.cli.arguments import parameter_count, positive_int
from roundelay.cli.tables import new_table, say, say_about, show

if TYPE_CHECKING:
    from roundelay.bench.exchange import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare its options."""
    add = parser.add_argument
    add("--parameters", type=parameter_count, default=43_000_000, metavar="N", help="float32 weights (default 43M)")
    add("--repetitions", type=positive_int, default=9, metavar="R", help="how often to measure (default 9)")
    add(
        "--rate",
        type=_rate,
        metavar="RATE",
        help="measure over a link of this rate each way, such as 200mbit, between two network namespaces; needs root",
    )
    parser.set_defaults(call=run)


def run(args: argparse.Namespace) -> None:
    """Measure, and print a table or JSON."""
    from roundelay.bench import exchange
    from roundelay.cli.bench import print_json

    media = "tcp and shared memory" if args.rate is None else f"tcp over {args.rate}"
    say_about(
        exchange.expected_s(args.parameters, args.repetitions, args.rate), f"{args.repetitions} exchanges by {media}"
    )
    with Console(stderr=True).status("starting two processes") as status:
        rows = exchange.measure(
            args.parameters, args.repetitions, args.rate, lambda medium: status.update(f"measuring {medium}")
        )
    if args.json:
        print_json(args, rows=[dataclasses.asdict(row) for row in rows], repetitions=args.repetitions)
        return
    show_rows(rows)


def show_rows(rows: list[Row]) -> None:
    """Print a table, and what the floor is."""
    table = new_table("one exchange of two learners, medians")
    table.add_column("medium", no_wrap=True)
    for heading in ("size", "exchange", "floor", "/floor", "MB/s each way"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        seconds = [f"{value:.4f} s" for value in (row.exchange_s, row.floor_s)]
        table.add_row(
            row.medium, f"{row.parameters / 1e6:g} M", *seconds, f"{row.ratio:.2f}", f"{row.MBps_each_way:.0f}"
        )
    show(table)
    say("floor: the same bytes both ways at the same time, by a plain socket, or by memcpy for shared memory")


def _rate(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[kmg]?bit", text):
        raise argparse.ArgumentTypeError(f"needs a rate of tc, such as 200mbit or 1gbit, got '{text}'")
    return text
