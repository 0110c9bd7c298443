"""`roundelay speech`: one module per sub-command, each with `add_arguments(parser)` and `run(args)`."""

from __future__ import annotations

import argparse
import importlib

COMMANDS = {
    "corpus": "find or make a speech corpus, check it and describe it",
    "transcribe": "transcribe audio files with the model of a run",
    "align": "find the times of phones and words with the model of a run",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands and their options."""
    sub = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"roundelay.cli.speech.{name}")
        command = sub.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        command.set_defaults(run_speech=module.run)
        module.add_arguments(command)


def run(args: argparse.Namespace) -> int | None:
    """Run the sub-command, and return its exit code."""
    code: int | None = args.run_speech(args)
    return code
