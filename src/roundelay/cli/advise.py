"""`roundelay advise`: which strategy on which topology suits a cluster."""

from __future__ import annotations

import argparse
import dataclasses
import json

from roundelay.cli.arguments import bandwidth, byte_count, duration, number, positive_int
from roundelay.cli.tables import new_table, say, show, text
from roundelay.planning import Advice, Situation, advise
from roundelay.planning.advise import LEFT_OUT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; each is a field of Situation."""
    default = {field.name: field.default for field in dataclasses.fields(Situation)}
    add = parser.add_argument
    add("--learners", type=positive_int, required=True, metavar="N", help="number of learners")
    add("--model-bytes", type=byte_count, required=True, metavar="SIZE", help="bytes of one model: 165MB")
    add("--step-time", type=duration, required=True, metavar="TIME", help="mean compute time of a step: 300ms")
    add(
        "--step-spread", type=number, default=default["step_spread"], metavar="R", help="std of it / mean (default 0.1)"
    )
    add("--slowest-factor", type=number, default=1.0, metavar="F", help="how many times slower the slowest learner is")
    add(
        "--bandwidth",
        type=bandwidth,
        default=default["bandwidth_Bps"],
        metavar="B",
        help="per learner (default 10Gb/s)",
    )
    add("--latency", type=duration, default=default["latency_s"], metavar="TIME", help="of a message (default 50us)")
    add("--group-size", type=positive_int, default=1, metavar="M", help="learners in a super-learner (default 1: none)")
    add("--group-bandwidth", type=bandwidth, metavar="B", help="inside a super-learner (default: as --bandwidth)")
    add("--json", action="store_true", help="print JSON: every candidate, best first")


def run(args: argparse.Namespace) -> None:
    """Print the ranking."""
    situation = Situation(
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
    ranked = advise(situation)
    if args.json:
        print(json.dumps({"advice": [dataclasses.asdict(row) for row in ranked], "left_out": LEFT_OUT}, indent=2))
        return
    best_topology: dict[str, Advice] = {}
    for row in ranked:
        best_topology.setdefault(row.strategy, row)
    _show_table(list(best_topology.values()))
    for row in best_topology.values():
        name = f"{row.strategy} on {row.topology}" if row.topology else row.strategy
        say(f"{name}: {row.reason}.")
    say(f"\nEach strategy on its best topology; all {len(ranked)} combinations with --json.")
    say(LEFT_OUT)


def _show_table(ranked: list[Advice]) -> None:
    table = new_table("best first")
    for heading in ("strategy", "topology"):
        table.add_column(heading)
    for heading in ("step\nms", "steps/s", "of\nideal", "variance\n(ασ)²"):
        table.add_column(heading, justify="right")
    for row in ranked:
        variance = "unbounded" if row.stationary_variance is None else f"{row.stationary_variance:.3g}"
        figures = (text(row.step_s * 1e3), text(row.steps_per_s), f"{row.ratio_to_ideal:.2f}", variance)
        table.add_row(row.strategy, row.topology or "-", *figures)
    show(table)
