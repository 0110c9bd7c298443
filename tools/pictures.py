"""Draws the pictures of README and docs again, each with the command of the page that shows it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import roundelay
from roundelay.bench.network_results import read
from roundelay.bench.throughput import Row
from roundelay.cli import main
from roundelay.reports.plots.bench import plot_rows as plot_throughput
from roundelay.reports.plots.network import plot_rows
from roundelay.reports.plots.timeline import plot_timeline

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COMMANDS = {
    "gaps.svg": "topology compare --learners 64 --plot",
    "ring.svg": "topology ring --learners 16 --draw",
    "random-ring.svg": "topology random-ring --learners 16 --draw",
    "torus.svg": "topology torus --learners 16 --draw",
    "exponential.svg": "topology exponential --learners 16 --draw",
    "one-peer-exponential.svg": "topology one-peer-exponential --learners 16 --draw",
    "base-graph.svg": "topology base-graph --learners 12 --draw",
    "scaling.svg": "plan --learners 256 --model-bytes 165MB --step-time 300ms --group-size 4 --group-bandwidth 400Gb/s --plot",
}

NETWORK = {  # recorded by `roundelay bench network`
    "network-steps.svg": "2026-11-18-network.json",
    "network-loss.svg": "2026-11-18-network-language.json",
}
THROUGHPUT = (
    "2026-11-18-throughput-1M.json",
    "2026-11-18-throughput-10M.json",
)  # by `roundelay bench throughput --json`

STRATEGIES = {
    "allreduce": roundelay.Allreduce,
    "dpsgd": lambda: roundelay.DPSGD("random-ring"),
    "adpsgd": lambda: roundelay.ADPSGD("random-ring"),
    "delay-by-one": roundelay.DelayByOne,
    "super-learner": lambda: roundelay.SuperLearner(roundelay.ADPSGD("ring"), group_size=2),
}

for name, strategy_of in STRATEGIES.items():
    plot_timeline(strategy_of, [3.0, 1.0, 1.0, 1.0], FOLDER / f"timeline-{name}.svg")

for name, command in COMMANDS.items():
    code = main([*shlex.split(command), str(FOLDER / name)])
    if code:
        raise SystemExit(code)

measured = [row for name in THROUGHPUT for row in json.loads((RESULTS / name).read_text())["rows"]]
plot_throughput([Row(**row) for row in measured], FOLDER / "bench-throughput.svg")

for name, results in NETWORK.items():
    plot_rows(read(RESULTS / results), FOLDER / name)
