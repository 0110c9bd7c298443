"""The `roundelay` command: one module per sub-command, each with `add_arguments(parser)` and `run(args)`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from roundelay.errors import RoundelayError, UsageError, closest, unknown

COMMANDS = {
    "train": "train a recipe with several learners; watch, stop and resume the run",
    "launch": "start a script of your own with several learners; one that fails ends no other, and may come back",
    "evaluate": "evaluate the mean model of a run on held-out data; speech is decoded and scored",
    "report": "write one HTML page about one run or several",
    "topology": "show the spectral gap, cost and picture of one topology, or compare all of them",
    "plan": "predict which strategy and topology suit a cluster, and how they scale",
    "simulate": "train a recipe with virtual learners on a modelled network",
    "reproduce": "test the papers' claims, each with a verdict",
    "bench": "measure the speed of every strategy on this machine, beside DDP and beside no communication",
    "chaos": "train while learners are killed, frozen and added, beside the same run undisturbed",
    "rendezvous": "run the server that learners on several machines connect to",
    "completion": "print a script with which bash, zsh or fish complete commands, options and names",
    "speech": "prepare a speech corpus, transcribe audio, align phones and words",
}
RENAMED = {
    "advise": "plan",
    "scaling": "plan",
    "corpus": "speech corpus",
    "transcribe": "speech transcribe",
    "align": "speech align",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError with one line instead of exiting, and never guesses an abbreviated option."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - argparse's own settings, passed on
        super().__init__(**({"allow_abbrev": False} | settings))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401 - as in argparse
        """Refuse unknown options in the parser of the sub-command, so that the error names its help."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            meant = closest(next((word for word in rest if word.startswith("--")), ""), self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
        return found, rest

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Refuse a value that is none of the choices, and say which one was probably meant."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown("value", str(value), map(str, action.choices)))

    def error(self, message: str) -> NoReturn:
        """Raise UsageError; argparse would print its whole usage text and exit."""
        subs = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        if subs and message.startswith("the following arguments are required"):
            message += f", one of {', '.join(subs[0].choices)}"
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build_parser(commands: Sequence[str] = tuple(COMMANDS)) -> Parser:
    """Parser of the given sub-commands. The other sub-commands are listed in the help, but their modules are not imported."""
    from roundelay import __version__

    parser = Parser(
        prog="roundelay",
        description="Decentralised data-parallel SGD: each learner averages its weights with a few neighbours.",
    )
    parser.add_argument("--version", action="version", version=f"roundelay {__version__}")
    sub = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = sub.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name in commands:
            module = importlib.import_module(f"roundelay.cli.{name}")
            command.set_defaults(call=module.run)
            module.add_arguments(command)
    return parser


def all_commands(parser: argparse.ArgumentParser, name: str = "") -> dict[str, argparse.ArgumentParser]:
    """Parsers of all commands by name; a command with sub-commands is there as "bench throughput" and so on."""
    subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not subs:
        return {name: parser}
    found: dict[str, argparse.ArgumentParser] = {}
    for word, inner in subs[0].choices.items():
        found |= all_commands(inner, f"{name} {word}".strip())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's mistake is one line on stderr and exit code 2."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except RoundelayError as error:
        print(f"roundelay: error: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("roundelay: error: this does not fit into memory; try fewer learners", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `roundelay ... | head` is no error; the rest of the output goes to /dev/null
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _run(words: list[str]) -> int:
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen != words[0]:
        raise UsageError(f"the command comes before its options, got '{words[0]}' first; see `roundelay --help`")
    if chosen in RENAMED:
        raise UsageError(f"`roundelay {chosen}` is now `roundelay {RENAMED[chosen]}`")
    if chosen is not None and chosen not in COMMANDS:
        raise UsageError(f"{unknown('command', chosen, COMMANDS)}; see `roundelay --help`")
    parser = build_parser([chosen] if chosen else [])
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    code: int | None = args.call(args)
    return code or 0
