"""`roundelay speech corpus`: find or make a speech corpus, check it and describe it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from roundelay.cli.arguments import more_than_0, number, positive_int, whole_number
from roundelay.cli.tables import new_table, say, show
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from roundelay.speech.corpus import Corpus
    from roundelay.speech.describe import Summary

KINDS = {
    "synth": "synthetic speech, generated on this machine",
    "an4": "AN4, from --data or $ROUNDELAY_DATA",
    "fsdd": "spoken digits, from --data or $ROUNDELAY_DATA",
    "librispeech": "LibriSpeech, from --data or $ROUNDELAY_DATA",
    "switchboard": "Switchboard and Hub5-2000, from --data or $ROUNDELAY_DATA",
    "manifest": "a folder with manifest.tsv",
    "kaldi": "a Kaldi data directory",
}
_FOLDER_KINDS = ("manifest", "kaldi")  # take the folder as an argument
_DATA_KINDS = ("an4", "fsdd", "librispeech", "switchboard")  # take it from --data or $ROUNDELAY_DATA


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    kinds = "; ".join(f"{name}: {text}" for name, text in KINDS.items())
    parser.add_argument("kind", metavar="KIND", choices=tuple(KINDS), help=kinds)
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, help="the folder of a manifest or kaldi corpus")
    add = parser.add_argument
    add("--data", type=Path, metavar="PATH", help="folder or archive of an4, fsdd, librispeech or switchboard")
    add("--out", type=Path, metavar="DIR", help="synth: the folder to write (default: in the cache)")
    add("--hours", type=more_than_0(number), metavar="H", help="synth: hours of speech (default 0.5)")
    add("--seed", type=whole_number, metavar="S", help="synth: seed of sentences, voices and noise (default 1)")
    add("--noise", type=float, metavar="DB", help="synth: add noise at this mean signal-to-noise ratio")
    add("--telephone", action="store_true", help="synth: 8 kHz, telephone band, µ-law")
    add("--workers", type=positive_int, metavar="N", help="synth: processes (default: one per core)")
    add("--allow-pipes", action="store_true", help="kaldi: run the commands in wav.scp; only if you trust them")
    add(
        "--quick",
        action="store_true",
        help="read only the headers of audio files; not for synth, which is always generated in full",
    )
    add("--json", action="store_true", help="print JSON, with every problem")


def run(args: argparse.Namespace) -> None:
    """Load or make the corpus, check all of it, and print a summary."""
    from roundelay.speech.describe import summary

    _check(args)
    corpus = _corpus(args)
    with _progress_bar("checking") as progress:
        found = summary(corpus, quick=args.quick, progress=progress)
    if args.json:
        document = dataclasses.asdict(found)
        document["lexicon"] = str(corpus.lexicon) if corpus.lexicon else None
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return
    _show(found, has_lexicon=corpus.lexicon is not None)
    if args.kind == "synth":
        assert corpus.lexicon
        say(f"The corpus is in {corpus.lexicon.parents[1]}.")


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that the kind of corpus does not have, and MissingExtraError without its libraries."""
    from roundelay.speech.corpora.catalogue import check_extra

    kind = args.kind
    if kind in _FOLDER_KINDS and args.folder is None:
        raise UsageError(f"`speech corpus {kind}` needs a folder: roundelay speech corpus {kind} DIR")
    if kind not in _FOLDER_KINDS and args.folder is not None:
        option = "--out DIR" if kind == "synth" else "--data PATH"
        raise UsageError(f"`speech corpus {kind}` takes no folder; use {option}")
    owners = {
        "data": _DATA_KINDS, "out": ("synth",), "hours": ("synth",), "seed": ("synth",), "noise": ("synth",),
        "telephone": ("synth",), "workers": ("synth",), "allow_pipes": ("kaldi",),
    }  # fmt: skip
    if args.quick and kind == "synth":
        raise UsageError("--quick checks only headers of files; for a small synthetic corpus use --hours 0.01")
    for option, kinds in owners.items():
        if getattr(args, option) not in (None, False) and kind not in kinds:
            raise UsageError(f"--{option.replace('_', '-')} goes with `speech corpus {'|'.join(kinds)}`")
    check_extra(kind)


def _corpus(args: argparse.Namespace) -> Corpus:
    from roundelay.speech.corpora.catalogue import corpus

    if args.kind == "synth":
        return _synth(args)
    return corpus(args.kind, args.folder or args.data, allow_pipes=args.allow_pipes)


def _synth(args: argparse.Namespace) -> Corpus:
    from roundelay.speech.synth.generate import synth
    from roundelay.speech.synth.shard import SynthConfig

    default = SynthConfig()
    config = SynthConfig(
        hours=default.hours if args.hours is None else args.hours,
        seed=default.seed if args.seed is None else args.seed,
        snr_dB=args.noise,
        telephone=args.telephone,
    )
    with _progress_bar("speaking") as progress:
        return synth(config, args.out, args.workers, progress)


@contextmanager
def _progress_bar(doing: str) -> Iterator[Callable[[float, float], None]]:
    """A progress bar on stderr; call the yielded function with what is done and the total."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(found: Summary, *, has_lexicon: bool) -> None:
    say(f"{found.name}: {found.description}")
    table = new_table("")
    table.add_column("split")
    for heading in ("utterances", "unusable", "hours", "speakers", "words", "aligned"):
        table.add_column(heading, justify="right")
    for name, split in found.splits.items():
        counts = (split.speakers, split.words, split.aligned)
        table.add_row(name, str(split.utterances), str(split.unusable), f"{split.hours:.3f}", *map(str, counts))
    show(table)
    rates = ", ".join(f"{rate / 1000:g} kHz" for rate in found.rates_Hz) or "no audio"
    say(f"{found.vocabulary} different words, {len(found.phones)} phones, {rates}.")
    if found.unknown_words:
        examples = ", ".join(list(found.unknown_words)[:5])
        times = sum(found.unknown_words.values())
        lacking = "lexicon" if has_lexicon else "training split"
        say(f"The {lacking} lacks {len(found.unknown_words)} words that occur {times} times: {examples}")
    if not found.problems:
        say("No problems found.")
    for kind, count in found.problems.items():
        first = next(case for case in found.cases if case.startswith(f"{kind}: "))
        say(f"{count} × {first}")
