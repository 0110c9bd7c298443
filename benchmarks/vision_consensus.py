"""Is the mean model as accurate as its learners? Evaluates both from a checkpoint of a run.

    python benchmarks/vision_consensus.py runs/fashion --split test
    python benchmarks/vision_consensus.py runs/fashion --samples-seen 220000   # while rates are large and learners far apart

Prints top-1 of every learner with its own weights and BatchNorm statistics, of the mean model, and of two wrong means: one whose
statistics are learner 0's, and one that averages variances as if all learners had the same means.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch import Tensor

from roundelay.training.checkpoint import choose
from roundelay.training.evaluator import evaluating
from roundelay.training.run_result import SPLITS, RunResult
from roundelay.weights.average import mean_module, mean_tree
from roundelay.weights.serialization import read_state

Module = dict[str, Tensor]
STATISTICS = ("running_mean", "running_var")


def candidates(learners: dict[int, Module]) -> dict[str, Module]:
    """The models to compare, by name."""
    states = list(learners.values())
    mean, first = mean_module(states), states[0]
    own_statistics = {name: first[name] if name.endswith(STATISTICS) else value for name, value in mean.items()}
    return {f"learner {rank}": state for rank, state in learners.items()} | {
        "mean": mean,
        "mean, statistics of learner 0": own_statistics,
        "mean, variances averaged": mean_tree(states),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--samples-seen", type=int, help="of the checkpoint (default: the last)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    run = RunResult.read(arguments.run)
    task, last = run.task(), choose(arguments.run / "checkpoints", arguments.samples_seen)
    learners: dict[int, Module] = {rank: read_state(last.path(rank))["module"] for rank in sorted(last.files)}
    figures: dict[str, dict[str, float]] = {}
    for name, state in candidates(learners).items():
        module = task.module()
        module.load_state_dict(state)
        with evaluating(module):
            sums = task.evaluate(module, arguments.split)
        figures[name] = {key: value / sums["samples"] for key, value in sums.items() if key != "samples"}
    best = max(figures[f"learner {rank}"]["top1"] for rank in learners)
    behind = best - figures["mean"]["top1"]
    if arguments.json:
        print(json.dumps({"split": arguments.split, "models": figures, "behind_best_learner": behind}, indent=2))
        return
    for name, each in figures.items():
        print(f"{name:30}  top1 {100 * each['top1']:.2f} %  loss {each['loss']:.4f}")
    print(f"the mean is {100 * behind:+.2f} points behind the best learner")


if __name__ == "__main__":
    main()
