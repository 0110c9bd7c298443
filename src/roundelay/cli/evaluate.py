"""`roundelay evaluate`: figures of a finished run's mean model on held-out data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from roundelay.cli.arguments import positive_int
from roundelay.cli.tables import new_table, say, show, text

HEADINGS = {
    "words": "words",
    "substitutions": "sub",
    "deletions": "del",
    "insertions": "ins",
    "utterances": "utterances",
    "sentence_error": "with errors",
    "real_time_factor": "× real time",
}
EXAMPLES = 3  # number of correct transcripts shown, and of transcripts with errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the directory of a finished run")
    add("--split", metavar="SPLIT", default="test", help="valid or test (default: test)")
    add(
        "--corpus",
        metavar="DIR",
        type=Path,
        help="speech: evaluate on this folder with manifest.tsv, not on the run's own corpus",
    )
    add(
        "--passes",
        metavar="N",
        type=positive_int,
        help="speech with fMLLR: how often to decode; each pass adapts to speakers by the words of the one before (default 2)",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Evaluate a split, and print the figures."""
    from roundelay.training.run_result import RunResult

    result = RunResult.read(args.run)
    with Console(stderr=True).status(f"evaluating {args.run} on {args.split}"):
        figures = result.task_class.evaluate_run(args.run, args.split, args.corpus, args.passes)
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
    shown = figures | {"sentence_error": f"{100 * figures['sentence_error']:.1f} %"}
    _show_figures({heading: shown[name] for name, heading in HEADINGS.items()})
    if len(figures["features"]) > 1:
        wers = ", ".join(f"{100 * wer:.2f} %" for wer in figures["wer_by_pass"])
        kinds = " + ".join(figures["features"])
        say(f"Features {kinds}; speakers adapted to: {figures['speakers']}. WER of each pass of decoding: {wers}.")
    unknown = figures["unknown_words"]
    if unknown:
        examples, times = ", ".join(list(unknown)[:8]), sum(unknown.values())
        say(f"Words that are not in the lexicon, so cannot be recognised: {examples} ({times} occurrences).")
    if figures["unusable"]:
        say(f"Utterances without usable audio: {figures['unusable']}; their words count as deletions.")
    if figures["problems"]:
        counts = ", ".join(f"{kind}: {count}" for kind, count in figures["problems"].items())
        say(f"Problems with the data: {counts}; one line each in {run}/problems-{suffix}.txt")
    _show_parts(figures)
    _show_examples(run / f"recogs-{suffix}.txt")
    say(f"Transcripts: {run}/recogs-{suffix}.txt; errors: {run}/errs-{suffix}.txt")


def _show_parts(figures: dict[str, Any]) -> None:
    """Print WERs of Switchboard and CallHome by our scorer, and by NIST's if it is installed."""
    if "parts" in figures:
        say("Our scorer: " + ", ".join(f"{part} {100 * wer:.2f} %" for part, wer in figures["parts"].items()) + ".")
    hub5 = figures.get("hub5", {})
    if "error" in hub5:
        say(f"NIST's scorer: {hub5['error']}.")
    elif hub5:
        say("NIST's scorer: " + ", ".join(f"{part} {100 * scored['wer']:.2f} %" for part, scored in hub5.items()) + ".")


def _show_examples(recogs: Path) -> None:
    from roundelay.speech.score_files import read_recogs

    result = read_recogs(recogs)
    table = new_table("", header=False)
    for utterance in [each for each in result.utterances if not each.errors][:EXAMPLES]:
        table.add_row("correct", " ".join(utterance.reference))
    for utterance in [each for each in result.utterances if each.errors][:EXAMPLES]:
        table.add_row("reference", " ".join(utterance.reference))
        table.add_row("recognised", " ".join(utterance.hypothesis))
    show(table)
