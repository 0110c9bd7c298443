"""`roundelay reproduce`: test the claims of the papers. Each claim has an experiment that gives a verdict."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from roundelay.cli.arguments import known, make_folder, positive_int, whole_number
from roundelay.cli.tables import new_table, say, say_about, show
from roundelay.errors import UsageError, check_installed, unknown

if TYPE_CHECKING:
    from roundelay.papers import Claim, Finding

FIRST_SEED = 100  # settings were chosen with seeds 0 to 4, so claims need other seeds
FEWEST_SEEDS = 3  # fewer give no useful interval, and so no verdict
CLAIM_NAMES = ("mixing", "large-batches", "stragglers", "delay-by-one", "rate", "equal-bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    known(add("claims", nargs="*", metavar="CLAIM", help=f"{', '.join(CLAIM_NAMES)} (default: all)"), CLAIM_NAMES)
    add(
        "--seeds",
        type=positive_int,
        default=FEWEST_SEEDS,
        metavar="N",
        help=f"runs per claim, each with its own seed (default 3); fewer than {FEWEST_SEEDS} give no verdict",
    )
    add(
        "--first-seed",
        type=whole_number,
        default=FIRST_SEED,
        metavar="SEED",
        help="the first of these seeds (default %(default)s); the settings were chosen with seeds 0 to 4",
    )
    add("--out", type=Path, metavar="DIR", help="write a plot and a JSON file for each claim")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Test the claims one after the other; Ctrl-C keeps the finished ones."""
    for name in args.claims:
        if name not in CLAIM_NAMES:
            raise UsageError(unknown("claim", name, CLAIM_NAMES))
    if args.out:
        make_folder(args.out, "--out")
        check_installed("matplotlib", "a plot of each claim", "plots")
    check_installed("scipy", "a confidence interval", "analysis")
    documents: list[dict[str, Any]] = []
    interrupted = False
    try:
        _test_all(args, documents)
    except KeyboardInterrupt:
        interrupted = True
    _report(documents, args, interrupted=interrupted)
    if interrupted:
        raise KeyboardInterrupt


def _test_all(args: argparse.Namespace, documents: list[dict[str, Any]]) -> None:
    import torch

    from roundelay.papers import CLAIMS

    torch.set_num_threads(1)  # on small tensors several threads are slower than one
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    names = args.claims or CLAIM_NAMES
    for name in names:
        CLAIMS[name].check()
    console = Console(stderr=True)
    say_about(sum(CLAIMS[name].seed_s for name in names) * args.seeds, f"{len(names)} x {args.seeds} runs on one core")
    with Progress(*columns, console=console) as bar:
        for name in names:
            task = bar.add_task(name, total=1.0)
            claim, begun = CLAIMS[name], time.process_time()
            finding = _judged(claim.experiment(seeds, partial(_advance, bar, task)), len(seeds))
            bar.update(task, completed=1.0, description=f"{name}: {finding.verdict}")
            documents.append(claim.document(finding, seeds, time.process_time() - begun))
            if args.out:
                _write(args.out, claim, finding, documents[-1])


def _judged(finding: Finding, seeds: int) -> Finding:
    """The finding, with no verdict if there are too few seeds for one."""
    if seeds >= FEWEST_SEEDS:
        return finding
    too_few = (
        f"{seeds} {'seed is' if seeds == 1 else 'seeds are'} too few for a verdict, use --seeds {FEWEST_SEEDS} or more."
    )
    return dataclasses.replace(finding, verdict="inconclusive", sentence=f"{too_few} {finding.sentence}")


def _advance(bar: Progress, task: TaskID, part: float) -> None:
    bar.update(task, completed=part)


def _write(folder: Path, claim: Claim, finding: Finding, document: dict[str, Any]) -> None:
    (folder / f"{claim.name}.json").write_text(json.dumps(document, indent=2) + "\n")
    if finding.panels:
        from roundelay.reports.plots.reproduce import plot_panels

        plot_panels(finding.panels, folder / f"{claim.name}.svg")


def _report(documents: list[dict[str, Any]], args: argparse.Namespace, *, interrupted: bool) -> None:
    if args.json:
        print(json.dumps({"claims": documents, "seeds": args.seeds, "interrupted": interrupted}, indent=2))
        return
    if not documents:
        print("interrupted before the first claim was complete")
        return
    table = new_table(f"seeds {args.first_seed} to {args.first_seed + args.seeds - 1}, intervals of 95 %")
    for heading in ("claim", "verdict"):
        table.add_column(heading, no_wrap=True)
    table.add_column("CPU s", justify="right")
    for document in documents:
        table.add_row(document["name"], document["verdict"], f"{document['cpu_s']:.0f}")
    show(table)
    for document in documents:
        say(f"{document['name']}: {document['found']}\n")
    if args.out:
        print(f"written to {args.out}")
    if interrupted:
        print("interrupted; the claims above are complete")
