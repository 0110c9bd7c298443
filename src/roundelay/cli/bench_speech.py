"""`roundelay bench speech`: hours of audio per hour of one core, and the memory of a flat start."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rich.console import Console

from roundelay.cli.arguments import duration, more_than_0
from roundelay.cli.tables import new_table, say, say_about, show
from roundelay.errors import check_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare its options."""
    add = parser.add_argument
    add("--run", dest="run_folder", type=Path, metavar="RUN", help="decode the test split of this finished run, too")
    add("--seconds", type=more_than_0(duration), default=5.0, metavar="TIME", help="to measure each case (default 5s)")
    add(
        "--hours",
        type=_hours,
        default=(0.2, 1.0),
        metavar="HOURS",
        help="of made-up speech for the memory of a flat start; 20 h take half an hour (default 0.2,1)",
    )
    parser.set_defaults(call=run)


def run(args: argparse.Namespace) -> None:
    """Measure, and print a table or JSON."""
    from roundelay.bench import speech
    from roundelay.cli.bench import print_json
    from roundelay.training.run_result import RunResult

    check_installed("soundfile", "reading and writing audio", "speech")
    if args.run_folder is not None:
        RunResult.read(args.run_folder)  # refuses a folder without a finished run before the measurements
    decoding = "" if args.run_folder is None else "without decoding, "
    say_about(speech.expected_s(args.seconds, args.hours), f"{decoding}{args.seconds:g} s a case, and a flat start")
    rows = []
    with Console(stderr=True).status("features") as status:
        for row in speech.measure(args.seconds, args.hours, args.run_folder):
            status.update(f"measured {row.what}")
            rows.append(row)
    if args.json:
        print_json(args, rows=[dataclasses.asdict(row) for row in rows])
        return
    table = new_table("speech on one core")
    table.add_column("what")
    for heading in ("hours of speech per hour", "× real time", "memory"):
        table.add_column(heading, justify="right")
    for row in rows:
        speed = "" if row.hours_per_hour is None else f"{row.hours_per_hour:,.1f}"
        factor = "" if row.hours_per_hour is None else f"{1 / row.hours_per_hour:.4f}"
        table.add_row(row.what, speed, factor, "" if row.memory_MB is None else f"{row.memory_MB:.0f} MB")
    show(table)
    say(
        "Memory is that of the process, without memory-mapped features, whose pages the system takes back when it needs them."
    )


def _hours(text: str) -> tuple[float, ...]:
    try:
        hours = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        hours = (-1.0,)
    if any(each <= 0 for each in hours):
        raise argparse.ArgumentTypeError(f"needs hours above 0, such as 1,5,20, got '{text}'")
    return hours
