"""`roundelay bench accelerator`: whether `adpsgd` hides the copies between host and device."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from rich.console import Console

from roundelay.cli.arguments import bandwidth, duration, more_than_0, positive_int
from roundelay.cli.tables import new_table, say, say_duration, show
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from roundelay.bench.accelerator import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare its options."""
    positive_time = more_than_0(duration)
    add = parser.add_argument
    add("--parameters", type=positive_int, default=43_000_000, metavar="N", help="weights (default 43000000)")
    add("--step", type=positive_time, default=0.3, metavar="TIME", help="computation of a step (default 300ms)")
    add(
        "--bandwidth",
        type=more_than_0(bandwidth),
        default=12e9,
        metavar="RATE",
        help="of copies between host and emulated device (default 12GB/s); not used with a real one",
    )
    add("--seconds", type=positive_time, default=12.0, metavar="TIME", help="per case and repetition (default 12s)")
    add("--repetitions", type=positive_int, default=3, metavar="R", help="how often to measure each case (default 3)")
    parser.set_defaults(call=run, learners=2)


def run(args: argparse.Namespace) -> None:
    """Measure, and print a table or JSON."""
    from roundelay.bench import accelerator
    from roundelay.cli.bench import print_json

    if args.learners < 2:
        raise UsageError(f"a benchmark of communication needs at least 2 learners, got {args.learners}")
    say_duration(len(accelerator.CASES) * args.repetitions, args.seconds)
    with Console(stderr=True).status("starting learners") as status:
        rows = accelerator.run(
            learners=args.learners,
            parameters=args.parameters,
            step_s=args.step,
            bandwidth_Bps=args.bandwidth,
            seconds=args.seconds,
            repetitions=args.repetitions,
            progress=lambda case: status.update(f"measured {case.strategy} {case.copies} {case.transport}"),
        )
    if args.json:
        settings = {"parameters": args.parameters, "step_s": args.step, "bandwidth_Bps": args.bandwidth}
        rows_of = [dataclasses.asdict(row) for row in rows]
        print_json(args, note=accelerator.note(), rows=rows_of, repetitions=args.repetitions, **settings)
        return
    show_rows(rows, args)
    say(accelerator.note())


def show_rows(rows: list[Row], args: argparse.Namespace) -> None:
    """Print a table, and a line about memory."""
    title = (
        f"steps per second, {args.parameters / 1e6:g} M weights, {1e3 * args.step:g} ms steps, {args.learners} learners"
    )
    table = new_table(title)
    for heading in ("strategy", "copies", "through"):
        table.add_column(heading, no_wrap=True)
    for heading in ("steps/s", "/none", "range", "exch"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        figures = (
            f"{row.steps_per_s:.2f}",
            f"{row.ratio_to_none:.3f}",
            "{:.3f}-{:.3f}".format(*row.ratio_to_none_range),
        )
        table.add_row(row.strategy, row.copies, row.transport, *figures, f"{row.exchanges_per_step:.2f}")
    show(table)
    over_sockets = next(row for row in rows if row.host_copies)
    say(
        f"Memory of adpsgd beside the weights themselves: on the device {over_sockets.device_copies:.2f} models, on the host "
        f"{over_sockets.host_copies:.2f} models (over sockets)."
    )
