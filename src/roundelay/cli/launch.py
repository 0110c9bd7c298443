"""`roundelay launch`: start a script of your own with several learners, each its own failure domain."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from roundelay.cli.arguments import add_security, connection_settings, positive_int, rendezvous_address
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from roundelay.cluster.launcher import Launcher
    from roundelay.training.supervisor import ConnectionSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--learners", type=positive_int, default=2, metavar="N", help="learners of the run (default: 2)")
    add("--min-learners", type=positive_int, default=1, metavar="N", help="stop below N living learners (default: 1)")
    add(
        "--restarts",
        type=int,
        default=0,
        metavar="R",
        help="how many times to start a failed learner again; -1: no limit (default: 0)",
    )
    add(
        "--logs",
        type=Path,
        metavar="DIR",
        help="write one file per learner, instead of lines with the learner's number",
    )
    add("--rendezvous", metavar="HOST:PORT", help="the server of a run on several machines; see `roundelay rendezvous`")
    add("--here", type=positive_int, metavar="N", help="with --rendezvous: learners to start on this machine")
    add_security(parser)
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    add("script", metavar="SCRIPT", help="a Python file that makes a roundelay.Learner")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def run(args: argparse.Namespace) -> int:
    """Start the learners, and wait until all have ended."""
    if not args.module and not Path(args.script).is_file():
        raise UsageError(f"there is no script '{args.script}'; for a module give -m")
    if args.min_learners > args.learners:
        raise UsageError(f"--min-learners {args.min_learners} is more than the {args.learners} learners of the run")
    if args.here is not None and args.rendezvous is None:
        raise UsageError("--here goes with --rendezvous; without one all learners are started on this machine")
    if args.here is not None and args.here > args.learners:
        raise UsageError(f"--here {args.here} is more than the {args.learners} learners of the run; see --learners")
    logging.basicConfig(level=logging.WARNING, format="roundelay: %(message)s", stream=sys.stderr)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    address = None if args.rendezvous is None else rendezvous_address(args.rendezvous)
    settings = connection_settings(args, address)
    with tempfile.TemporaryDirectory(prefix="roundelay-") as folder, contextlib.ExitStack() as stack:
        ticket = Path(folder) / "ticket.json"
        start = _at_a_rendezvous if address else _on_this_machine
        return start(args, settings, ticket, stack).run()


def _command(args: argparse.Namespace) -> list[str]:
    return [sys.executable, *(["-m"] if args.module else []), args.script, *args.arguments]


def _on_this_machine(
    args: argparse.Namespace, settings: ConnectionSettings, ticket: Path, stack: contextlib.ExitStack
) -> Launcher:
    """This process runs the rendezvous."""
    from roundelay.cluster.elastic_world import Rendezvous
    from roundelay.cluster.launcher import Launcher

    rendezvous = stack.enter_context(
        Rendezvous(
            args.learners,
            settings.host,
            min_learners=args.min_learners,
            security=settings.security,
            open_collectives=settings.open_collectives,
        )
    )
    rendezvous.ticket.write(ticket)
    return Launcher(
        _command(args),
        ticket,
        list(range(args.learners)),
        restarts=args.restarts,
        logs=args.logs,
        died=rendezvous.server.process_died,
    )


def _at_a_rendezvous(
    args: argparse.Namespace, settings: ConnectionSettings, ticket: Path, stack: contextlib.ExitStack
) -> Launcher:
    """The rendezvous runs elsewhere, and the learners of several machines find each other there."""
    from roundelay.cluster.launcher import Launcher
    from roundelay.cluster.rendezvous.client import RendezvousClient
    from roundelay.cluster.ticket import Ticket

    assert settings.rendezvous is not None
    client = stack.enter_context(RendezvousClient(settings.rendezvous, settings.security))
    # The same command on all machines is one run.
    identity = hashlib.sha256(repr((args.script, args.arguments, args.learners)).encode()).hexdigest()[:16]
    environment = settings.security.environment()
    Ticket(settings.rendezvous, environment, args.learners, args.min_learners, identity).write(ticket)
    return Launcher(
        _command(args),
        ticket,
        [None] * (args.here or args.learners),
        restarts=args.restarts,
        logs=args.logs,
        died=client.report_death,
        waiting=lambda: client.ask_for_info().get("waiting", "") if client.connected else "the rendezvous is away",
    )
