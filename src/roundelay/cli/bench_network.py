"""`roundelay bench network`: the strategies on slow links between emulated machines."""

from __future__ import annotations

import argparse
import dataclasses
import re
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from roundelay.cli.arguments import (
    duration,
    more_than_0,
    output_path,
    picture_path,
    positive_int,
    slowdown,
    whole_number,
)
from roundelay.cli.tables import new_table, say_duration, show
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from roundelay.bench.network import Row, Strategy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare its options."""
    add = parser.add_argument
    add(
        "--rates",
        type=_rates,
        default=("none", "1gbit", "200mbit", "50mbit"),
        metavar="RATES",
        help="of every machine's link (default none,1gbit,200mbit,50mbit)",
    )
    add(
        "--compute",
        choices=("emulated", "language"),
        default="emulated",
        help="emulated: steps that sleep, 10 M parameters (default); language: a GPT of 0.4 M parameters, with times to a loss",
    )
    add("--data", default="", metavar="PATH", help="text of the language model; by default in $ROUNDELAY_DATA")
    add("--strategies", metavar="NAMES", help="only these labels, separated by commas (default: all)")
    add("--every", type=positive_int, default=50, metavar="H", help="local steps of local-sgd (default 50)")
    add("--slow", type=slowdown, default=1.0, metavar="F", help="how many times slower learner 0 is (default 1)")
    add("--seed", type=whole_number, default=0, metavar="S", help="of the language model and its samples (default 0)")
    add("--seconds", type=more_than_0(duration), default=30.0, metavar="TIME", help="per case (default 30s)")
    add(
        "--into",
        type=partial(output_path, endings=[".json"]),
        metavar="FILE",
        help="add the rows to this JSON file, to measure piece by piece",
    )
    add("--plot", type=picture_path, metavar="FILE", help="draw bars, and losses over time (.svg, .png, .pdf)")
    parser.set_defaults(call=run)


def run(args: argparse.Namespace) -> None:
    """Measure, and print a table or JSON."""
    from roundelay.bench import network, network_results
    from roundelay.bench.namespaces import check_available
    from roundelay.cli.bench import MOST_LEARNERS, made_by, print_json

    if not 2 <= args.learners <= MOST_LEARNERS:
        raise UsageError(f"a benchmark of communication needs 2 to {MOST_LEARNERS} learners, got {args.learners}")
    settings = network.Settings(
        args.rates,
        args.compute,
        _chosen(args.strategies, network.STRATEGIES),
        args.learners,
        args.seconds,
        every=args.every,
        slow=args.slow,
        data=args.data,
        seed=args.seed,
    )
    check_available()
    say_duration(len(settings.rates) * len(settings.strategies), settings.seconds)
    with Console(stderr=True).status("starting learners") as status:
        rows = network.run(settings, lambda rate, strategy: status.update(f"measured {strategy} at {rate}"))
    if args.into:
        rows = network_results.add(args.into, settings, rows, made_by())
    if args.plot:
        from roundelay.reports.plots.network import plot_rows

        plot_rows(rows, args.plot)
    if args.json:
        print_json(args, rows=[dataclasses.asdict(row) for row in rows], compute=args.compute, every=args.every)
        return
    for rate in dict.fromkeys(row.rate for row in rows):
        _show(rate, [row for row in rows if row.rate == rate])
    if args.plot:
        print(f"plotted to {args.plot}")


def _show(rate: str, rows: list[Row]) -> None:
    table = new_table(f"links without a limit of rate, {len(rows)} cases" if rate == "none" else f"links of {rate}")
    table.add_column("strategy", no_wrap=True)
    several = len({row.seed for row in rows}) > 1
    if several:
        table.add_column("seed", justify="right", no_wrap=True)
    learning = any(row.losses for row in rows)
    for heading in ("steps/s", "/none", "MB/step", *(("loss", "s to DDP's loss") if learning else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ratio = "-" if row.ratio_to_none is None else f"{row.ratio_to_none:.2f}"
        figures = [f"{row.steps_per_s:.2f}", ratio, f"{row.bytes_per_step / 1e6:.2f}"]
        if learning:
            figures += [f"{row.losses[-1][1]:.3f}", "-" if row.ddp_loss_s is None else f"{row.ddp_loss_s:.1f}"]
        table.add_row(row.strategy, *([str(row.seed)] if several else []), *figures)
    show(table)


def _chosen(names: str | None, known: tuple[Strategy, ...]) -> list[Strategy]:
    if names is None:
        return list(known)
    labels = {strategy.label: strategy for strategy in known}
    if missing := [name for name in names.split(",") if name not in labels]:
        raise UsageError(f"unknown strategy '{missing[0]}'. Known: {', '.join(labels)}")
    return [labels[name] for name in names.split(",")]


def _rates(text: str) -> tuple[str, ...]:
    rates = tuple(word.strip() for word in text.split(","))
    for rate in rates:
        if rate != "none" and not re.fullmatch(r"\d+(\.\d+)?(kbit|mbit|gbit)", rate):
            raise argparse.ArgumentTypeError(f"needs rates such as none,1gbit,200mbit, got '{rate}'")
    return rates
