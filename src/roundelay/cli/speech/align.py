"""`roundelay speech align`: phone and word times found by the model of a finished run, for training or for inspection."""

from __future__ import annotations

import argparse
from pathlib import Path

from roundelay.cli.arguments import make_folder
from roundelay.cli.tables import say

FAILURES_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="folder of a finished run of speech recognition")
    add("--corpus", metavar="DIR", type=Path, help="a folder with manifest.tsv (default: the run's own corpus)")
    add("--out", metavar="DIR", type=Path, help="folder for phones.ctm and words.ctm (default: RUN/align)")


def run(args: argparse.Namespace) -> None:
    """Align all splits of the corpus, write the times, and name utterances that could not be aligned."""
    from roundelay.speech.corpora.manifest import manifest
    from roundelay.speech.prepare import corpus_of
    from roundelay.speech.recognise import Recogniser
    from roundelay.speech.segments import write_ctm
    from roundelay.training.run_result import RunResult

    recogniser = Recogniser.of_run(RunResult.read(args.run))
    corpus = manifest(args.corpus) if args.corpus else corpus_of(recogniser.config)
    folder: Path = args.out or args.run / "align"
    make_folder(folder, "--out")  # before the work, which takes minutes
    found = recogniser.aligned_corpus(corpus)
    write_ctm(folder / "phones.ctm", found.phones)
    write_ctm(folder / "words.ctm", found.words)
    say(f"{len(found.phones)} of {len(corpus)} utterances are aligned: {folder}/phones.ctm, {folder}/words.ctm")
    for name, reason in list(found.failed.items())[:FAILURES_SHOWN]:
        say(f"not aligned: {name}: {reason}")
    say(f"To train on these times: roundelay train RECIPE --set settings.labels={folder}")
