"""All strategies on the same samples of real speech, compared by word error rate, with and without a straggler.

    python benchmarks/speech_strategies.py --out out/strategies                                # needs AN4
    python benchmarks/speech_strategies.py --out out/strategies-slow --epochs 3 --slow 0:10
    python benchmarks/speech_strategies.py --out out/straggler --epochs 3 --slow 0:10 --cases allreduce "adpsgd, random ring"

The optimizer is that of the papers, SGD with momentum: the mean of all learners then follows one learner that has the whole
batch. Adam divides by the noise of a local batch, which is larger, so its steps get smaller with more learners.

Every case is a run of `roundelay train`. Finished runs in OUT are kept, so the command can be stopped and repeated. After
`--minutes` no further run is started. OUT/table.md and OUT/table.json have the results so far.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.speech.score import Score, UtteranceScore, difference
from roundelay.speech.score_files import read_recogs
from roundelay.training import run_directory

BATCH = 64  # of all learners together
LEARNERS = 4
SETTINGS = shlex.split("--set optimizer.name=sgd --set optimizer.lr=0.4 --set checkpoint.every_epochs=1")


@dataclass(frozen=True)
class Case:
    """A strategy with a number of learners."""

    name: str
    strategy: str
    topology: str = ""  # of strategies that have one
    learners: int = LEARNERS
    group_size: int = 1

    @property
    def arguments(self) -> list[str]:
        topology = ["--topology", self.topology] if self.topology else []
        words = f"--learners {self.learners} --strategy {self.strategy} --group-size {self.group_size}"
        return [*words.split(), *topology, "--set", f"data.batch={BATCH // self.learners}"]


SINGLE = Case("single learner", "allreduce", learners=1)
CASES = (
    SINGLE,
    Case("allreduce", "allreduce"),
    Case("dpsgd, fixed ring", "dpsgd", "ring"),
    Case("dpsgd, random ring", "dpsgd", "random-ring"),
    Case("adpsgd, fixed ring", "adpsgd", "ring"),
    Case("adpsgd, random ring", "adpsgd", "random-ring"),
    Case("delay-by-one", "delay-by-one"),
    Case("2 × 2 super-learners, adpsgd", "adpsgd", "random-ring", group_size=2),
)


@dataclass(frozen=True)
class Run:
    """One case with one seed, in a folder of its own."""

    case: Case
    seed: int
    folder: Path

    @property
    def finished(self) -> bool:
        return all((self.folder / f"evaluation-{split}.json").is_file() for split in ("valid", "test"))

    def do(self, recipe: str, more: list[str]) -> None:
        """Train if there is no model yet, then decode. An unfinished training begins again."""
        if not (self.folder / run_directory.MODEL).is_file():
            shutil.rmtree(self.folder, ignore_errors=True)
            _roundelay(
                "train", recipe, *self.case.arguments, "--seed", str(self.seed), *more, "--out", str(self.folder)
            )
        learners = json.loads((self.folder / run_directory.RESULTS).read_text())["learners"]
        if learners != self.case.learners:
            sys.exit(f"only {learners} learners finished {self.folder}; its logs say why; delete it to train again")
        for split in ("valid", "test"):
            _roundelay("evaluate", str(self.folder), "--split", split, "--json")

    @property
    def score(self) -> Score:
        """The score on the test split; names of utterances begin with the seed."""
        found = read_recogs(self.folder / "recogs-test.txt").utterances
        return Score(tuple(UtteranceScore(f"{self.seed}-{each.name}", each.pairs) for each in found))

    def figures(self, target: float) -> dict[str, Any]:
        """Time, losses, word error rates, and the time until the mean model has at most the target loss on valid."""
        results = json.loads((self.folder / run_directory.RESULTS).read_text())
        words = {
            split: json.loads((self.folder / f"evaluation-{split}.json").read_text()) for split in ("valid", "test")
        }
        reached = (row["elapsed_s"] for row in _validations(self.folder) if row["loss"] <= target)
        return {
            "seed": self.seed,
            "wer_valid": words["valid"]["wer"],
            "wer_test": words["test"]["wer"],
            "loss_valid": results["valid"]["loss"],
            "loss_test": results["test"]["loss"],
            "training_s": results["elapsed_s"],
            "target_s": next(reached, None),
            "machine": json.loads((self.folder / run_directory.MACHINE).read_text()),
        }


def _roundelay(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "roundelay", *words], check=True, stdout=subprocess.DEVNULL)


def _validations(folder: Path) -> Iterator[dict[str, Any]]:
    for line in (folder / run_directory.METRICS).read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "evaluation" and row["split"] == "valid":
            yield row


def rows_of(runs: list[Run], target: float) -> list[dict[str, Any]]:
    """Means over seeds of each case with a finished run, and its difference to the single learner with the same seeds."""
    done = {(run.case, run.seed): run for run in runs if run.finished}
    rows = []
    for case in CASES:
        mine = [run for (of, _), run in done.items() if of == case]
        if not mine:
            continue
        figures = [run.figures(target) for run in mine]
        row: dict[str, Any] = {"case": case.name, "learners": case.learners, "batch": BATCH, "runs": figures}
        for name in ("wer_valid", "wer_test", "loss_valid", "loss_test", "training_s"):
            row[name] = statistics.mean(each[name] for each in figures)
        row["ci95"] = list(_pooled(mine).ci95())
        reached = [each["target_s"] for each in figures]
        row["target_s"] = None if None in reached else statistics.mean(reached)
        both = [run for run in mine if (SINGLE, run.seed) in done]
        if both and case != SINGLE:
            compared = difference(_pooled([done[SINGLE, run.seed] for run in both]), _pooled(both))
            row["difference"] = {"wer": compared.wer, "ci95": list(compared.ci95), "p_better": compared.p_better}
        rows.append(row)
    return rows


def _pooled(runs: list[Run]) -> Score:
    return Score(tuple(each for run in sorted(runs, key=lambda run: run.seed) for each in run.score.utterances))


def table(rows: list[dict[str, Any]], target: float) -> str:
    """A table in Markdown: strategy, learners, batch, error rates, time, speed-up."""
    single = next((row for row in rows if row["case"] == SINGLE.name), None)
    lines = [
        f"| strategy | learners × batch | seeds | WER test [95 %] | minus single learner [95 %] | WER valid | CE test | training "
        f"| speed-up | valid CE ≤ {target:g} after |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        speed = f"{single['training_s'] / row['training_s']:.2f}" if single else "-"
        less = row.get("difference")
        lines.append(
            f"| {row['case']} | {row['learners']} × {BATCH // row['learners']} | {len(row['runs'])} "
            f"| {_percent(row['wer_test'], row['ci95'])} | {_percent(less['wer'], less['ci95'], '+') if less else '-'} "
            f"| {100 * row['wer_valid']:.2f} % | {row['loss_test']:.4f} | {row['training_s']:.0f} s | {speed} "
            f"| {'-' if row['target_s'] is None else format(row['target_s'], '.0f') + ' s'} |"
        )
    return "\n".join(lines) + "\n"


def _percent(value: float, interval: list[float], sign: str = "") -> str:
    low, high = (format(100 * bound, f"{sign}.2f") for bound in interval)
    return f"{format(100 * value, f'{sign}.2f')} % [{low}, {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/strategies"))
    parser.add_argument("--recipe", default="an4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    names = [case.name for case in CASES]
    parser.add_argument(
        "--cases", nargs="+", default=names, choices=names, metavar="CASE", help=", ".join(map(repr, names))
    )
    parser.add_argument("--epochs", default="10")
    parser.add_argument(
        "--slow", default="", metavar="LEARNER:FACTOR", help="slow learner, in all cases except the single learner"
    )
    parser.add_argument("--target", type=float, default=1.2, help="validation cross-entropy per frame")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many minutes")
    arguments = parser.parse_args()
    runs = [
        Run(case, seed, arguments.out / f"{case.name.replace(',', '').replace(' ', '-')}-{seed}")
        for seed in arguments.seeds
        for case in CASES
        if case.name in arguments.cases
    ]
    began = time.monotonic()
    for run in runs:
        if not run.finished and time.monotonic() - began < 60 * arguments.minutes:
            slow = ["--slow", arguments.slow] if arguments.slow and run.case.learners > 1 else []
            run.do(arguments.recipe, ["--epochs", arguments.epochs, *SETTINGS, *slow])
    rows = rows_of(runs, arguments.target)
    settings = {"command": shlex.join(["python", *sys.argv]), "epochs": arguments.epochs, "slow": arguments.slow}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "table.json").write_text(
        json.dumps(settings | {"target": arguments.target, "rows": rows}, indent=1)
    )
    (arguments.out / "table.md").write_text(table(rows, arguments.target))
    print(table(rows, arguments.target))
    missing = [f"{run.case.name} (seed {run.seed})" for run in runs if not run.finished]
    if missing:
        print(f"Not done yet: {', '.join(missing)}; run the same command again.")


if __name__ == "__main__":
    main()
