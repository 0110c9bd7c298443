"""`roundelay completion`: a script that lets a shell complete commands, options and names. Made from the parser."""

from __future__ import annotations

import argparse
from pathlib import Path

from roundelay.cli.arguments import output_path, picture_path

SHELLS = {
    "bash": 'eval "$(roundelay completion bash)"',
    "zsh": 'eval "$(roundelay completion zsh)"',
    "fish": "roundelay completion fish | source",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    how = "; ".join(f"{shell}: {command}" for shell, command in SHELLS.items())
    parser.add_argument(
        "shell", metavar="SHELL", choices=tuple(SHELLS), help=f"bash, zsh or fish. Put this into its start file: {how}"
    )


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    import shtab

    from roundelay.cli import all_commands, build_parser

    parser = build_parser()
    for command in all_commands(parser).values():
        for action in command._actions:
            if hasattr(action, "known"):
                action.complete = shtab.cmd("printf '%s\\n' " + " ".join(action.known))  # type: ignore[attr-defined]
            elif action.type in (Path, output_path, picture_path):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
