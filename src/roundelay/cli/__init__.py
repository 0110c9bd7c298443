"""The `roundelay` command: one file per sub-command, each with `add_arguments(parser)` and `run(args)`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from roundelay.errors import RoundelayError, UsageError, unknown

COMMANDS = {
    "train": "train a recipe with several learners; watch, stop and resume it",
    "evaluate": "figures of a run's mean model on held-out data; speech is decoded and scored",
    "transcribe": "what was said in audio files, by a run's model",
    "align": "times of phones and words, by a run's model",
    "report": "one page about one run or several, to look at in a browser",
    "topology": "spectral gap, cost and picture of a topology, or of all of them side by side",
    "advise": "which strategy on which topology suits a cluster, and why",
    "bench": "throughput of every strategy on this machine, against DDP and against no communication",
    "chaos": "a run whose learners die, freeze and are joined, beside the same run undisturbed",
    "rendezvous": "where learners of several machines meet",
    "simulate": "a recipe with virtual learners on a modelled network",
    "scaling": "predicted time per epoch and speed-up from 1 to 1024 learners",
    "corpus": "prepare, check and describe a speech corpus",
    "reproduce": "the papers' findings as experiments, each with a verdict",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, raised rather than exited with."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print with its whole usage text."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build_parser(commands: Sequence[str] = tuple(COMMANDS)) -> Parser:
    """The parser of the given sub-commands; the others are listed in the help but not imported."""
    from roundelay import __version__

    parser = Parser(
        prog="roundelay",
        description="Decentralised data-parallel SGD: learners average with a few neighbours, nobody waits for all.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"roundelay {__version__}")
    sub = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, summary in COMMANDS.items():
        command = sub.add_parser(name, help=summary, description=summary.capitalize() + ".", allow_abbrev=False)
        if name in commands:
            module = importlib.import_module(f"roundelay.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(call=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        chosen = next((word for word in words if not word.startswith("-")), None)
        if chosen is not None and chosen not in COMMANDS:
            raise UsageError(unknown("command", chosen, COMMANDS))
        parser = build_parser([chosen] if chosen else [])
        args = parser.parse_args(words)
        if args.command is None:
            parser.print_help()
            return 0
        code: int | None = args.call(args)
        sys.stdout.flush()
    except RoundelayError as error:
        print(f"roundelay: error: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("roundelay: error: this does not fit into memory; try fewer learners", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `roundelay ... | head` is no error; what is left to flush has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code or 0
