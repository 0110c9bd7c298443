"""`roundelay plan`: which strategy and topology suit a cluster, and how they scale from 1 learner to all of them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from roundelay.cli.arguments import (
    bandwidth,
    byte_count,
    duration,
    more_than_0,
    number,
    picture_path,
    positive_int,
    slowdown,
)
from roundelay.cli.tables import new_table, say, show, text
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from roundelay.planning import Candidate, Cluster, ScalingPoint

NEEDED = ("learners", "model_bytes", "step_time")
MOST_COLUMNS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Most of them are fields of `Cluster`."""
    add = parser.add_argument
    size, time, speed = more_than_0(byte_count), more_than_0(duration), more_than_0(bandwidth)
    add("--learners", type=positive_int, metavar="N", help="number of learners")
    add("--model-bytes", type=size, metavar="SIZE", help="size of one model, such as 165MB")
    add("--step-time", type=time, metavar="TIME", help="mean compute time of a step, such as 300ms")
    add(
        "--step-spread",
        type=number,
        default=0.1,
        metavar="R",
        help="standard deviation / mean of that time (default 0.1)",
    )
    add(
        "--slowest-factor",
        type=slowdown,
        default=1.0,
        metavar="F",
        help="how many times slower learner 0 is (default 1)",
    )
    add("--bandwidth", type=speed, default=1.25e9, metavar="B", help="bandwidth of a machine's link (default 10Gb/s)")
    add("--latency", type=duration, default=50e-6, metavar="TIME", help="latency of a message (default 50us)")
    add(
        "--group-size",
        type=positive_int,
        default=1,
        metavar="M",
        help="learners per machine, which share its link (default 1)",
    )
    add("--group-bandwidth", type=speed, metavar="B", help="bandwidth inside a machine (default: as --bandwidth)")
    add(
        "--epoch-steps",
        type=positive_int,
        metavar="K",
        help="steps of an epoch with one learner; adds times per epoch",
    )
    add("--papers", action="store_true", help="only show the papers' published hours beside the predicted ones")
    add("--plot", type=picture_path, metavar="FILE", help="plot speed-up and efficiency (.svg, .png, .pdf)")
    add("--json", action="store_true", help="print JSON: every candidate, best first, and every point of the scaling")


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError if the cluster is not described, or is described although --papers ignores it."""
    given = [
        f"--{name.replace('_', '-')}" for name in (*NEEDED, "epoch_steps", "plot") if getattr(args, name) is not None
    ]
    if args.papers:
        if given:
            raise UsageError(f"--papers is about the papers' own cluster; leave out {', '.join(given)}")
        return
    missing = [f"--{name.replace('_', '-')}" for name in NEEDED if getattr(args, name) is None]
    if missing:
        raise UsageError(f"plan needs {', '.join(missing)}, or --papers alone; see `roundelay plan --help`")


def run(args: argparse.Namespace) -> None:
    """Predict and print."""
    _check(args)
    if args.papers:
        _show_papers(json_wanted=args.json)
        return
    from roundelay.planning import best_of_each, ranking, scaling
    from roundelay.planning.ranking import LEFT_OUT, adam_advice

    cluster = _cluster(args)
    ranked = ranking(cluster)
    best = best_of_each(ranked)
    points = scaling(cluster, best, args.epoch_steps)
    if args.plot:
        from roundelay.reports.plots.scaling import plot_scaling

        plot_scaling(points, args.plot)
    if args.json:
        rows = {"ranking": [asdict(row) for row in ranked], "scaling": [asdict(point) for point in points]}
        print(json.dumps(rows | {"left_out": LEFT_OUT}, indent=2))
        return
    _show_ranking(best, cluster.learners)
    say(
        "Each strategy is on its best topology: the one with the most steps per second, and among those within 5 % the one "
        f"with the least variance. --json has all {len(ranked)} combinations.\n"
    )
    _show_scaling(points)
    if args.plot:
        print(f"plotted to {args.plot}")
    if advice := adam_advice(best[0]):
        say(advice)
    say(LEFT_OUT)


def _cluster(args: argparse.Namespace) -> Cluster:
    from roundelay.planning import Cluster

    return Cluster(
        learners=args.learners,
        model_bytes=args.model_bytes,
        step_s=args.step_time,
        step_spread=args.step_spread,
        slowest_factor=args.slowest_factor,
        bandwidth_Bps=args.bandwidth,
        latency_s=args.latency,
        group_size=args.group_size,
        group_bandwidth_Bps=args.group_bandwidth,
    )


def _show_ranking(best: list[Candidate], learners: int) -> None:
    table = new_table(f"{learners} learner{'s' if learners > 1 else ''}, best strategy first")
    for heading in ("strategy", "topology"):
        table.add_column(heading)
    for heading in ("step\nms", "steps/s", "of\nideal", "variance\n(ασ)²"):
        table.add_column(heading, justify="right")
    for row in best:
        variance = "unbounded" if row.stationary_variance is None else f"{row.stationary_variance:.3g}"
        figures = (text(row.step_s * 1e3), text(row.steps_per_s), f"{row.ratio_to_ideal:.2f}", variance)
        table.add_row(row.label, row.topology or "-", *figures)
    show(table)
    for row in best:
        say(f"{row.label}{f' on {row.topology}' if row.topology else ''}: {row.reason}.")


def _show_scaling(points: list[ScalingPoint]) -> None:
    by = {(point.strategy, point.learners): point for point in points}
    learners = sorted({point.learners for point in points})
    every = -(-len(learners) // MOST_COLUMNS)
    shown = sorted(learners[::-1][::every])
    with_epochs = points[0].epoch_s is not None
    table = new_table("speed-up" + (" (and time per epoch)" if with_epochs else "") + " by number of learners")
    table.add_column("strategy", no_wrap=True)
    for n in shown:
        table.add_column(str(n), justify="right")
    for strategy in dict.fromkeys(point.strategy for point in points):
        table.add_row(strategy, *(_cell(by.get((strategy, n))) for n in shown))
    show(table)


def _cell(point: ScalingPoint | None) -> str:
    if point is None:
        return "-"
    return text(point.speedup) + ("" if point.epoch_s is None else f"\n{_time_text(point.epoch_s)}")


def _time_text(seconds: float) -> str:
    """A time in at most eight characters.

    >>> _time_text(7.25), _time_text(2714), _time_text(300000)
    ('7.25 s', '45.2 min', '83.3 h')
    """
    unit, length_s = next(((unit, s) for unit, s in (("s", 1), ("min", 60)) if seconds < 100 * s), ("h", 3600))
    return f"{seconds / length_s:.3g} {unit}"


def _show_papers(*, json_wanted: bool) -> None:
    from roundelay.planning.published import SETTING, comparisons
    from roundelay.planning.ranking import LEFT_OUT

    rows = comparisons()
    if json_wanted:
        print(json.dumps({"papers": [asdict(row) for row in rows], "setting": SETTING, "left_out": LEFT_OUT}, indent=2))
        return
    table = new_table("2,000 hours of speech: published and predicted")
    for heading in ("system", "GPUs", "batch", "published h", "predicted h", ""):
        table.add_column(heading, justify="left" if heading in ("system", "") else "right")
    for row in rows:
        hours = (text(row.published_h), text(round(row.predicted_h, 2)), "fitted" if row.fitted else "predicted")
        table.add_row(row.system, str(row.learners), str(row.batch), *hours)
    show(table)
    say(SETTING)
    say(LEFT_OUT)
