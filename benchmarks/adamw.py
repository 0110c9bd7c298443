"""What averaging weights costs with AdamW: the recipe shakespeare with a smaller model, every strategy on the virtual clock.

    python benchmarks/adamw.py FILE --learners 4 --rates 4e-3 8e-3 --seeds 21 22 23 --out adamw.json

2 layers of width 64 (111 k parameters), 16 pieces of 64 characters per learner and step, warm-up over a tenth of the run,
cosine decay, clipping at 1. The strategies are the ones that train; compute times vary by a tenth. A rate is that of DDP, here
`allreduce`, at its peak; `schedule.reference_batch` gives the other strategies sqrt(n) times as much, times `--factors`.
`local-sgd` has its settings from `--every` and `--outer`. Prints one JSON row per run, with the loss of the mean model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from roundelay.simulation.compute import lognormal
from roundelay.simulation.network import Links
from roundelay.simulation.recipe import SimulatedRun
from roundelay.training import recipes, run_directory

STRATEGIES = ("allreduce", "delay-by-one", "dpsgd", "adpsgd", "local-sgd")
SIZES = {"layers": 2, "width": 64, "context": 64}
TEXT = 1_003_854 // 64  # pieces of tiny-shakespeare's training part
STEP_S, SPREAD = 0.1, 0.1
LINKS = Links(latency_s=1e-4, bandwidth_Bps=1.25e9)


def run(args: argparse.Namespace, strategy: str, rate: float, factor: float, seed: int) -> float:
    """The validation loss after one run."""
    samples = args.batch * args.learners
    epochs = args.steps * samples / TEXT
    outer_lr, outer_momentum = args.outer
    settings = {
        "data.batch": args.batch,
        "budget.epochs": epochs,
        "optimizer.lr": rate / samples**0.5 * (factor if strategy != "allreduce" else 1.0),
        "schedule.reference_batch": 1,
        "schedule.warmup_epochs": epochs / 10,
        "checkpoint.every_epochs": 1000,
    }
    settings |= {f"settings.{name}": value for name, value in SIZES.items()}
    if strategy == "local-sgd":
        settings |= {
            "topology": "complete",
            "local_sgd.every": args.every,
            "local_sgd.outer_lr": outer_lr,
            "local_sgd.outer_momentum": outer_momentum,
        }
    settings |= {"learners": args.learners, "strategy": strategy, "seed": seed, "settings.data": args.text}
    named = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in settings.items()]
    if strategy != "allreduce":
        named += [(key, value) for key, _, value in (each.partition("=") for each in args.set)]
    config = recipes.resolve(recipes.table_of("shakespeare"), named)
    with tempfile.TemporaryDirectory() as folder:
        run_directory.begin(Path(folder) / "run", config, "", simulated=True)
        simulated = SimulatedRun(config, Path(folder) / "run", LINKS, lognormal(STEP_S, SPREAD, seed))
        return float(simulated.run()["valid"]["loss"])


def main() -> None:
    """Run every strategy with every rate, factor and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="pieces per learner")
    parser.add_argument("--steps", type=int, default=400, help="of a learner")
    parser.add_argument("--rates", type=float, nargs="+", default=[8e-3])
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0], help="for all strategies but allreduce")
    parser.add_argument("--seeds", type=int, nargs="+", default=[21, 22, 23])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--every", type=int, default=10, help="local steps of local-sgd")
    parser.add_argument(
        "--outer", type=float, nargs=2, default=(0.7, 0.9), help="outer lr and outer momentum of local-sgd"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all strategies but allreduce")
    parser.add_argument("--out", type=Path, help="rows are added to this JSON document after each run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for seed, rate, strategy in itertools.product(args.seeds, args.rates, args.strategies):
        for factor in args.factors if strategy != "allreduce" else [1.0]:
            begin = time.process_time()
            loss = run(args, strategy, rate, factor, seed)
            row = {"strategy": strategy, "learners": args.learners, "batch": args.batch, "steps": args.steps}
            row |= {"rate": rate, "factor": factor, "seed": seed}
            if strategy == "local-sgd":
                row |= {"every": args.every, "outer": list(args.outer)}
            if strategy != "allreduce" and args.set:
                row |= {"set": args.set}
            row |= {"loss": round(loss, 4), "cpu_s": round(time.process_time() - begin)}
            print(json.dumps(row), flush=True)
            if args.out:
                add_row(args.out, row)


def add_row(path: Path, row: dict[str, object]) -> None:
    """Add a row to the document, which says by which commands, where and at which commit it was made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    document = json.loads(path.read_text()) if path.exists() else {"commands": [], "rows": []}
    document |= {"machine": f"{platform.machine()}, one thread", "torch": torch.__version__, "commit": commit.strip()}
    command = f"python {' '.join(sys.argv)}"
    document["commands"] += [command] if command not in document["commands"] else []
    document["rows"].append(row)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
