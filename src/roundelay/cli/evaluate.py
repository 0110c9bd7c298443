"""`roundelay evaluate`: what the mean model of a finished run is worth on held-out data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from roundelay.cli.tables import new_table, say, show, text
from roundelay.errors import UsageError

HEADINGS = {
    "words": "words",
    "substitutions": "sub",
    "deletions": "del",
    "insertions": "ins",
    "utterances": "utterances",
    "sentence_error": "with errors",
    "real_time_factor": "× real time",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the directory of a finished run")
    add("--split", metavar="SPLIT", default="test", help="valid or test (default: test)")
    add("--corpus", metavar="DIR", type=Path, help="speech: a folder with manifest.tsv that the run never saw")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Evaluate, and say what came out."""
    from roundelay.training.finished import FinishedRun

    finished = FinishedRun.read(args.run)
    # A task that is judged by more than its own sums, as speech is by its words, has a class method `evaluate_run`.
    evaluate_run = getattr(finished.task_class, "evaluate_run", None)
    if args.corpus and not evaluate_run:
        raise UsageError(f"--corpus is for runs of speech recognition; this is one of {finished.task_class.__name__}")
    figures: dict[str, Any] = (
        evaluate_run(args.run, args.split, args.corpus) if evaluate_run else finished.figures(args.split)
    )
    if args.json:
        print(json.dumps(figures, indent=2))
    elif "wer" in figures:
        suffix = f"{figures['corpus']}-{args.split}" if args.corpus else args.split
        _show_words(figures, args.run, suffix)
    else:
        _show_figures(figures)


def _show_figures(figures: dict[str, Any]) -> None:
    table = new_table("")
    for name in figures:
        table.add_column(name, justify="right")
    table.add_row(*map(text, figures.values()))
    show(table)


def _show_words(figures: dict[str, Any], run: Path, suffix: str) -> None:
    low, high = (100 * bound for bound in figures["ci95"])
    say(f"WER {100 * figures['wer']:.2f} % [{low:.2f}, {high:.2f}] on {figures['corpus']}, {figures['split']}:")
    _show_figures({heading: figures[name] for name, heading in HEADINGS.items()})
    unknown = figures["unknown_words"]
    if unknown:
        say(f"Not in the lexicon, so never recognised: {', '.join(list(unknown)[:8])} ({sum(unknown.values())} times).")
    if figures["unusable"]:
        say(f"{figures['unusable']} utterances have no usable audio; their words count as deletions.")
    say(f"Transcripts: {run}/recogs-{suffix}.txt; errors: {run}/errs-{suffix}.txt")
