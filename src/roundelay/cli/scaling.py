"""`roundelay scaling`: predicted time per epoch from 1 to 1024 learners, and the papers' hours beside the model's."""

from __future__ import annotations

import argparse
import dataclasses
import json

from roundelay.cli.arguments import bandwidth, byte_count, duration, number, output_path, positive_int
from roundelay.cli.tables import new_table, say, show, text
from roundelay.errors import UsageError

FITTED = (
    "Fitted: the time of a sample on one GPU, once per system, to the rows marked 'fitted'. Not fitted: model "
    "164.6 MiB, 100 Gb/s and 5 us between nodes of 4 GPUs, 50 GB/s inside, step times 10 % apart, 16 epochs of "
    "2,000 hours in windows of 21 frames, super-learners with adpsgd between nodes. Left out: data loading, "
    "evaluation, and GPUs that are less efficient on smaller batches."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--papers", action="store_true", help="the papers' setting beside their published hours, and nothing else")
    add("--model-bytes", type=byte_count, default=165e6, metavar="SIZE", help="of one model (default 165MB)")
    add("--step-time", type=duration, default=0.3, metavar="TIME", help="compute time of a step (default 300ms)")
    add("--step-spread", type=number, default=0.1, metavar="R", help="std of it / mean (default 0.1)")
    add("--batch", type=positive_int, default=128, metavar="B", help="samples of a learner's step (default 128)")
    add("--epoch-samples", type=positive_int, default=1_000_000, metavar="N", help="in an epoch (default 1000000)")
    add("--bandwidth", type=bandwidth, default=12.5e9, metavar="B", help="of a node's port (default 100Gb/s)")
    add("--latency", type=duration, default=5e-6, metavar="TIME", help="between nodes (default 5us)")
    add("--node-size", type=positive_int, default=4, metavar="M", help="learners on a node (default 4)")
    add("--inside-bandwidth", type=bandwidth, default=50e9, metavar="B", help="inside a node (default 50GB/s)")
    add("--plot", type=output_path, metavar="FILE", help="speed-up and efficiency (.svg, .png, .pdf)")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Predict and print."""
    from roundelay.planning.scaling import papers

    if args.papers:
        if args.plot:
            raise UsageError("--plot draws the prediction for your own job; leave --papers out")
        _papers(papers(), json_wanted=args.json)
        return
    _own(args)


def _papers(rows: list[dict[str, float | int | bool | str]], *, json_wanted: bool) -> None:
    if json_wanted:
        print(json.dumps({"papers": rows, "note": FITTED}, indent=2))
        return
    table = new_table("2,000 hours of speech: published and predicted")
    for heading in ("system", "GPUs", "batch", "published h", "predicted h", ""):
        table.add_column(heading, justify="left" if heading in ("system", "") else "right")
    for row in rows:
        figures = (text(row["published_h"]), text(row["predicted_h"]), "fitted" if row["fitted"] else "predicted")
        table.add_row(str(row["system"]), str(row["learners"]), str(row["batch"]), *figures)
    show(table)
    say(FITTED)


def _own(args: argparse.Namespace) -> None:
    from roundelay.planning.scaling import Job, predict
    from roundelay.simulation.network import Links

    for name in ("model_bytes", "step_time", "bandwidth", "inside_bandwidth"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(args, name):g}")
    links = Links(args.latency, args.bandwidth, args.node_size, args.latency, args.inside_bandwidth)
    job = Job(args.model_bytes, args.step_time, args.batch, args.epoch_samples, links, args.step_spread)
    rows = predict(job)
    if args.plot:
        from roundelay.reports.plots.scaling import plot_scaling

        plot_scaling(rows, args.plot)
    if args.json:
        print(json.dumps({"predictions": [dataclasses.asdict(row) for row in rows]}, indent=2))
        return
    learners = sorted({row.learners for row in rows})
    shown = [n for n in learners if n in (1, 4, 16, 64, 256, 1024)]
    by = {(row.strategy, row.learners): row for row in rows}
    table = new_table("efficiency (and seconds an epoch) by number of learners")
    table.add_column("strategy", no_wrap=True)
    for n in shown:
        table.add_column(str(n), justify="right")
    for strategy in dict.fromkeys(row.strategy for row in rows):
        cells = [f"{by[strategy, n].efficiency:.2f}\n({text(by[strategy, n].epoch_s)})" for n in shown]
        table.add_row(strategy, *cells)
    show(table)
    if args.plot:
        print(f"plotted to {args.plot}")
