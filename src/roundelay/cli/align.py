"""`roundelay align`: phone and word times by the model of a finished run, to train on or to look at."""

from __future__ import annotations

import argparse
from pathlib import Path

from roundelay.cli.tables import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the directory of a finished run of speech recognition")
    add("--corpus", metavar="DIR", type=Path, help="a folder with manifest.tsv (default: the run's own corpus)")
    add("--out", metavar="DIR", type=Path, help="where phones.ctm and words.ctm go (default: RUN/align)")


def run(args: argparse.Namespace) -> None:
    """Align all splits, write the times, and say what could not be aligned."""
    from roundelay.speech.corpora.manifest import manifest
    from roundelay.speech.feature_set import features
    from roundelay.speech.prepare import corpus_of
    from roundelay.speech.recognise import Recogniser, references
    from roundelay.speech.segments import write_ctm
    from roundelay.training.run_result import FinishedRun

    recogniser = Recogniser.of_run(FinishedRun.read(args.run))
    corpus = manifest(args.corpus) if args.corpus else corpus_of(recogniser.config)
    frames = features(corpus, recogniser.config.features).of(corpus.utterances)
    found = recogniser.times(frames, references(corpus.utterances))
    folder: Path = args.out or args.run / "align"
    folder.mkdir(parents=True, exist_ok=True)
    write_ctm(folder / "phones.ctm", found.phones)
    write_ctm(folder / "words.ctm", found.words)
    say(f"{len(found.phones)} of {len(corpus)} utterances are aligned: {folder}/phones.ctm, {folder}/words.ctm")
    for name, reason in list(found.failed.items())[:5]:
        say(f"not aligned: {name}: {reason}")
    say(f"To train on these times: roundelay train RECIPE --set settings.labels={folder}")
