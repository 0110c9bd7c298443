"""`roundelay simulate`: train a recipe in one process on a virtual clock, with modelled compute times and a modelled network."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from roundelay.cli.arguments import (
    add_configuration,
    add_recipe,
    bandwidth,
    configured,
    dated_folder,
    duration,
    number,
    positive_int,
)
from roundelay.cli.tables import new_table, show, text
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from roundelay.simulation.compute import Compute

STEP_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: those of `roundelay train`, and those of the modelled cluster."""
    add = parser.add_argument
    add_recipe(parser, "a recipe, as for `roundelay train`", optional=False)
    add_configuration(parser)
    add("--step-time", type=duration, metavar="TIME", help=f"mean compute time of a step (default {STEP_S * 1e3:g}ms)")
    add("--step-spread", type=number, metavar="R", help="standard deviation of the step time / its mean (default 0)")
    add("--times-of", type=Path, metavar="RUN", help="take the compute times from this real run instead")
    add(
        "--network",
        type=_network,
        default=(12.5e9, 5e-6),
        metavar="BANDWIDTH,LATENCY",
        help="of the links between nodes (default 100Gb,5us)",
    )
    add("--node-size", type=positive_int, default=1, metavar="M", help="learners per node (default 1)")
    add(
        "--inside-bandwidth",
        type=bandwidth,
        default=50e9,
        metavar="B",
        help="of the links inside a node (default 50GB/s)",
    )
    add("--out", type=Path, metavar="RUN", help="the run's directory (default: runs/simulated-RECIPE-DATE-TIME)")
    add("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> None:
    """Simulate, with a progress bar on stderr, and print the figures of the mean model.

    Raises UsageError for options that contradict each other or describe no cluster.
    """
    from roundelay.simulation.compute import slowed
    from roundelay.simulation.network import Links
    from roundelay.simulation.recipe import SimulatedRun
    from roundelay.training import recipes, run_directory

    if not args.inside_bandwidth > 0:
        raise UsageError("--inside-bandwidth must be more than 0, got 0; give a bandwidth such as 50GB/s")
    config = recipes.resolve(recipes.table_of(args.recipe), configured(args))
    folder: Path = args.out or dated_folder(args.recipe, "simulated-")
    rate_Bps, latency_s = args.network
    links = Links(latency_s, rate_Bps, args.node_size, latency_s, args.inside_bandwidth)
    compute = slowed(_compute(args, config.seed), config.slowness())
    run_directory.begin(folder, config, shlex.join(["roundelay", *sys.argv[1:]]), simulated=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{config.learners} learners", total=1.0)
        simulated = SimulatedRun(config, folder, links, compute)
        results = simulated.run(lambda part: bar.update(task, completed=part))
    if args.json:
        print(json.dumps(results | {"run": str(folder)}, indent=2))
        return
    table = new_table("mean model")
    for heading in ("split", *results["valid"]):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for split in ("valid", "test"):
        table.add_row(split, *(text(value) for value in results[split].values()))
    show(table)
    print(f"{results['samples']:,} samples in {results['elapsed_s']:.4g} virtual seconds")
    print(f"run: {folder}")


def _compute(args: argparse.Namespace, seed: int) -> Compute:
    from roundelay.simulation.compute import constant, lognormal, measured
    from roundelay.training import run_directory

    if args.times_of:
        if args.step_time is not None or args.step_spread is not None:
            raise UsageError("--times-of sets the compute times; leave --step-time and --step-spread out")
        metrics: Path = args.times_of / run_directory.METRICS
        if not metrics.is_file():
            raise UsageError(f"--times-of needs the directory of a run; there is no '{metrics}'")
        return measured(metrics)
    step_s = STEP_S if args.step_time is None else args.step_time
    if not step_s > 0:
        raise UsageError(f"--step-time must be more than 0, got {step_s:g}; give a time such as 100ms")
    return lognormal(step_s, args.step_spread, seed) if args.step_spread else constant(step_s)


def _network(value: str) -> tuple[float, float]:
    rate, comma, latency = value.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"needs BANDWIDTH,LATENCY such as 100Gb,5us, got '{value}'")
    found = bandwidth(rate), duration(latency)
    if not found[0] > 0:
        raise argparse.ArgumentTypeError(f"needs a bandwidth of more than 0, such as 100Gb, got '{rate}'")
    return found
