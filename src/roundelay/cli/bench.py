"""`roundelay bench`: speed of the strategies beside no communication and DDP, and the cost of metrics and checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from roundelay.cli import bench_accelerator, bench_exchange, bench_network, bench_speech
from roundelay.cli.arguments import duration, more_than_0, parameter_count, picture_path, positive_int
from roundelay.cli.tables import new_table, say_about, say_duration, show
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from roundelay.bench.cases import Case
    from roundelay.bench.throughput import Row

PARAMETERS = (1_000_000, 10_000_000)
MOST_LEARNERS = 64
SUMMARIES = {
    "throughput": "steps per second of every strategy with equally fast learners",
    "stragglers": "steps per second of every strategy with one slow learner",
    "overhead": "what metrics and checkpoints cost a run",
    "exchange": "seconds of one exchange of weights, beside the same bytes by plain sockets or memcpy",
    "accelerator": "whether adpsgd hides the copies between host and accelerator; emulated without CUDA",
    "network": "every strategy on slow links between emulated machines; needs root",
    "speech": "hours of audio per hour of one core for features, training and decoding; memory of a flat start",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and their options."""
    sub = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    parsers = {
        name: sub.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for name, text in SUMMARIES.items()
    }
    bench_exchange.add_arguments(parsers["exchange"])
    bench_speech.add_arguments(parsers["speech"])
    for each in (parser for name, parser in parsers.items() if name not in ("exchange", "speech")):  # two, or none
        each.add_argument(
            "--learners", type=positive_int, default=4, metavar="N", help="learner processes (default %(default)s)"
        )
    for name in ("throughput", "stragglers"):
        _add_throughput_arguments(parsers[name])
    parsers["throughput"].set_defaults(slow=(0, 1.0))
    parsers["stragglers"].add_argument(
        "--slow", type=_slow, default=(0, 10.0), metavar="LEARNER:FACTOR", help="the slow learner (default 0:10)"
    )
    parsers["overhead"].add_argument(
        "--seconds", type=more_than_0(duration), default=60.0, metavar="TIME", help="length of the run (default 60s)"
    )
    parsers["overhead"].set_defaults(call=run_overhead)
    bench_accelerator.add_arguments(parsers["accelerator"])
    bench_network.add_arguments(parsers["network"])
    for each in parsers.values():
        each.add_argument("--json", action="store_true", help="print JSON, with the command and the machine")


def _add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--parameters",
        type=_counts,
        default=PARAMETERS,
        metavar="COUNTS",
        help="weights of the model; one benchmark each (default 1M,10M)",
    )
    add(
        "--compute",
        choices=("emulated", "lstm"),
        default="emulated",
        help="emulated: sleep, as the CPU does while an accelerator computes (default); lstm: train an LSTM on the CPU",
    )
    add(
        "--seconds",
        type=more_than_0(duration),
        default=4.0,
        metavar="TIME",
        help="time to measure, per case and repetition (default 4s)",
    )
    add("--repetitions", type=positive_int, default=5, metavar="R", help="how often to measure each case (default 5)")
    add("--plot", type=picture_path, metavar="FILE", help="draw a bar chart (.svg, .png, .pdf)")


def run(args: argparse.Namespace) -> None:
    """Measure throughput with a progress bar on stderr, and print a table or JSON."""
    from roundelay.bench import throughput

    learner, factor = args.slow
    if not 2 <= args.learners <= MOST_LEARNERS:
        raise UsageError(
            f"a benchmark of communication needs 2 to {MOST_LEARNERS} learners, one process each on this machine, "
            f"got {args.learners}"
        )
    if learner >= args.learners:
        raise UsageError(f"--slow names learner {learner}, but the learners are 0 to {args.learners - 1}")
    cases = throughput.cases_for(args.parameters, slow=factor, slow_learner=learner, compute=args.compute)
    say_duration(len(cases) * args.repetitions, args.seconds)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting learners", total=len(cases) * args.repetitions)

        def progress(case: Case) -> None:
            bar.update(task, advance=1, description=f"{case.strategy} {case.parameters / 1e6:g} M")

        rows = throughput.run(
            cases, learners=args.learners, seconds=args.seconds, repetitions=args.repetitions, progress=progress
        )
    if args.plot:
        from roundelay.reports.plots.bench import plot_rows

        plot_rows(rows, args.plot)
    if args.json:
        print_json(args, rows=[dataclasses.asdict(row) for row in rows], repetitions=args.repetitions)
        return
    show(_table(rows))
    if args.plot:
        print(f"plotted to {args.plot}")


def run_overhead(args: argparse.Namespace) -> None:
    """Measure the overhead of metrics and checkpoints in one run, and print a table or JSON."""
    from roundelay.bench import overhead

    say_about(args.seconds + 15, f"a run of {args.seconds:g} s")  # learners start and stop
    with Console(stderr=True).status("running"):
        rows = overhead.measure(learners=args.learners, seconds=args.seconds)
    if args.json:
        print_json(args, rows=[dataclasses.asdict(row) for row in rows])
        return
    table = new_table("additional time of a step")
    table.add_column("case")
    for heading in ("steps/s", "overhead", "95 % interval"):
        table.add_column(heading, justify="right")
    for row in rows:
        interval = "{:+.2%} to {:+.2%}".format(*row.ci95)
        table.add_row(row.case, f"{row.steps_per_s:.1f}", f"{row.overhead:+.2%}", interval)
    show(table)


def print_json(args: argparse.Namespace, **document: object) -> None:
    """Print the document with the number of learners, the seconds, the command and the machine."""
    document |= {name: getattr(args, name) for name in ("learners", "seconds") if name in args}
    print(json.dumps(document | made_by(), indent=2))


def made_by() -> dict[str, object]:
    """The command and the machine."""
    from roundelay.training.run_directory import machine

    return {"command": shlex.join(["roundelay", *sys.argv[1:]]), "machine": machine()}


def _table(rows: list[Row]) -> Table:
    slow = f", one learner {rows[0].slow:g} times slower" if rows[0].slow > 1 else ""
    table = new_table(f"steps per second of all learners, medians{slow}")
    table.add_column("strategy", no_wrap=True)
    for heading in ("size", "steps/s", "/none", "/DDP", "/ideal", "exch"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ratios = [f"{value:.2f}" for value in (row.ratio_to_none, row.ratio_to_ddp, row.ratio_to_ideal)]
        exchanges = f"{row.exchanges_per_step:.2f}" if row.exchanges_per_step else "-"
        table.add_row(row.name, f"{row.parameters / 1e6:g} M", f"{row.total_steps_per_s:.1f}", *ratios, exchanges)
    return table


def _slow(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)", text)
    if not match or float(match[2]) < 1:
        raise argparse.ArgumentTypeError(
            f"needs LEARNER:FACTOR with a factor of at least 1, such as 0:10, got '{text}'"
        )
    return int(match[1]), float(match[2])


def _counts(text: str) -> tuple[int, ...]:
    return tuple(parameter_count(word) for word in text.split(","))
