"""`roundelay bench`: speed as ratios measured in one run against no communication and against torch's DDP."""

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

from roundelay.cli.arguments import duration, output_path, positive_int
from roundelay.cli.tables import new_table, show
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from roundelay.bench.cases import Case
    from roundelay.bench.throughput import Row

PARAMETERS = (1_000_000, 10_000_000)
CASE_S, OVERHEAD_S = 4.0, 60.0  # --seconds, unless said
REPETITIONS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "what",
        metavar="WHAT",
        choices=("throughput", "stragglers", "overhead"),
        help="throughput: equally fast learners; stragglers: one of them slower; overhead: of metrics and checkpoints",
    )
    add = parser.add_argument
    add("--slow", type=_slow, metavar="LEARNER:FACTOR", help="stragglers: who is slower and how much (default 0:10)")
    add("--learners", type=positive_int, default=4, metavar="N", help="processes (default 4)")
    add(
        "--parameters", type=_counts, default=PARAMETERS, metavar="COUNTS", help="of the model: 1M, or 1M,10M (default)"
    )
    add(
        "--compute",
        choices=("emulated", "lstm"),
        default="emulated",
        help="sleep as an accelerator would, or a real LSTM",
    )
    add("--seconds", type=duration, metavar="TIME", help="per case and repetition (default 4s; overhead: 60s, once)")
    add("--repetitions", type=positive_int, metavar="R", help=f"interleaved (default {REPETITIONS})")
    add("--plot", type=output_path, metavar="FILE", help="bar chart (.svg, .png, .pdf)")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Measure, with a progress bar on stderr, and print."""
    from roundelay.bench import throughput

    if args.what == "overhead":
        _overhead(args)
        return
    if args.slow and args.what == "throughput":
        raise UsageError("--slow goes with `bench stragglers`")
    if args.learners < 2:
        raise UsageError(f"a benchmark of communication needs at least 2 learners, got {args.learners}")
    seconds, repetitions = args.seconds or CASE_S, args.repetitions or REPETITIONS
    learner, factor = (args.slow or (0, 10.0)) if args.what == "stragglers" else (0, 1.0)
    if learner >= args.learners:
        raise UsageError(f"--slow names learner {learner}, but there are {args.learners}, numbered from 0")
    cases = throughput.cases_for(args.parameters, slow=factor, slow_learner=learner, compute=args.compute)
    with _progress() as bar:
        task = bar.add_task("starting learners", total=len(cases) * repetitions)

        def progress(case: Case) -> None:
            bar.update(task, advance=1, description=f"{case.strategy} {case.parameters / 1e6:g} M")

        rows = throughput.run(
            cases, learners=args.learners, seconds=seconds, repetitions=repetitions, progress=progress
        )
    if args.plot:
        from roundelay.reports.plots.bench import plot_rows

        plot_rows(rows, args.plot)
    if args.json:
        document = {
            "rows": [dataclasses.asdict(row) for row in rows],
            "learners": args.learners,
            "seconds": seconds,
            "repetitions": repetitions,
        }
        _print_json(document)
        return
    show(_table(rows))
    if args.plot:
        print(f"plotted to {args.plot}")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def _overhead(args: argparse.Namespace) -> None:
    from roundelay.bench import overhead

    if args.slow or args.plot or args.repetitions:
        raise UsageError("--slow, --plot and --repetitions do not go with `bench overhead`, which is one run")
    seconds = args.seconds or OVERHEAD_S
    with Console(stderr=True).status(f"a run of about {seconds:g} s"):
        rows = overhead.measure(learners=args.learners, seconds=seconds)
    if args.json:
        _print_json({"rows": [dataclasses.asdict(row) for row in rows], "learners": args.learners, "seconds": seconds})
        return
    table = new_table("what steps take more than those of the same run that nothing falls in")
    table.add_column("case")
    for heading in ("steps/s", "overhead", "95 %"):
        table.add_column(heading, justify="right")
    for row in rows:
        interval = "{:+.2%} to {:+.2%}".format(*row.ci95)
        table.add_row(row.case, f"{row.steps_per_s:.1f}", f"{row.overhead:+.2%}", interval)
    show(table)


def _print_json(document: dict[str, object]) -> None:
    """With what a figure needs to be believed: how it was made, on which machine, when and at which commit."""
    from roundelay.training.run_directory import machine

    command = shlex.join(["roundelay", *sys.argv[1:]])
    print(json.dumps(document | {"command": command, "machine": machine()}, indent=2))


def _table(rows: list[Row]) -> Table:
    slow = f", one learner {rows[0].slow:g} times slower" if rows[0].slow > 1 else ""
    table = new_table(f"steps per second of all learners, medians{slow}")
    table.add_column("strategy", no_wrap=True)
    for heading in ("size", "steps/s", "/none", "/DDP", "/ideal", "exch."):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        name = " ".join(filter(None, (row.strategy, row.topology, f"({row.transport})" if row.transport else None)))
        ratios = [f"{value:.2f}" for value in (row.ratio_to_none, row.ratio_to_ddp, row.ratio_to_ideal)]
        exchanges = f"{row.exchanges_per_step:.2f}" if row.exchanges_per_step else "-"
        table.add_row(name, f"{row.parameters / 1e6:g} M", f"{row.total_steps_per_s:.1f}", *ratios, exchanges)
    return table


def _slow(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)", text)
    if not match or float(match[2]) < 1:
        raise argparse.ArgumentTypeError(
            f"needs LEARNER:FACTOR with a factor of at least 1, such as 0:10, got '{text}'"
        )
    return int(match[1]), float(match[2])


def _counts(text: str) -> tuple[int, ...]:
    counts = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(M|K|)", word.strip())
        count = int(float(match[1]) * {"M": 1e6, "K": 1e3, "": 1}[match[2]]) if match else 0
        if count < 1000:
            raise argparse.ArgumentTypeError(f"needs parameter counts of at least 1000, such as 1M,10M, got '{text}'")
        counts.append(count)
    return tuple(counts)
