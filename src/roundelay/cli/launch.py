"""`roundelay launch`: start a script of your own with several learners, each its own failure domain."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roundelay.cli.arguments import add_security, connection_settings, make_folder, positive_int, rendezvous_address
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from roundelay.cluster.connection_settings import ConnectionSettings
    from roundelay.cluster.elastic_world import Rendezvous
    from roundelay.cluster.learner_process import Program
    from roundelay.cluster.run_rendezvous import RemoteRendezvous


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--learners", type=positive_int, default=2, metavar="N", help="learners of the run (default: 2)")
    add("--min-learners", type=positive_int, default=1, metavar="N", help="stop below N living learners (default: 1)")
    add(
        "--restarts",
        type=_restarts,
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


def _restarts(text: str) -> int:
    if text == "-1":
        return -1
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"needs a whole number of at least 0, or -1 for no limit, got '{text}'")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Start the learners, and wait until all have ended."""
    from roundelay.cluster.launcher import Launcher, Reporter

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
        make_folder(args.logs, "--logs")
    address = None if args.rendezvous is None else rendezvous_address(args.rendezvous)
    settings = connection_settings(args, address)
    reporter = Reporter()
    with contextlib.closing(_rendezvous(args, settings)) as rendezvous:
        chosen = address is None
        learners = list(range(args.learners)) if chosen else [None] * (args.here or args.learners)
        launcher = Launcher(_program(args, settings), rendezvous, learners, restarts=args.restarts, reporter=reporter)
        code = launcher.run()
    if code == 1:
        first = next(iter(launcher.failed.values()), "no failure")
        reporter.say(f"no learner has finished; the first one ended with {first}")
    return code


def _program(args: argparse.Namespace, settings: ConnectionSettings) -> Program:
    from roundelay.cluster.elastic_world import HOST
    from roundelay.cluster.learner_process import Program

    command = [sys.executable, *(["-m"] if args.module else []), args.script, *args.arguments]
    return Program(command, {} if settings.host is None else {HOST: settings.host}, args.logs)


def _rendezvous(args: argparse.Namespace, settings: ConnectionSettings) -> Rendezvous | RemoteRendezvous:
    """Run the rendezvous in this process, or connect to the one at which learners of several machines find each other."""
    from roundelay.cluster.elastic_world import Rendezvous
    from roundelay.cluster.run_rendezvous import RemoteRendezvous
    from roundelay.cluster.ticket import Ticket

    if settings.rendezvous is None:
        return Rendezvous(
            args.learners,
            settings.server_host,
            min_learners=args.min_learners,
            security=settings.security,
            open_collectives=settings.open_collectives,
            on_event=lambda event: None,  # the launcher tells what happens to its processes
        )
    # The same command on all machines is one run.
    identity = hashlib.sha256(repr((args.script, args.arguments, args.learners)).encode()).hexdigest()[:16]
    security = settings.security.environment()
    return RemoteRendezvous(Ticket(settings.rendezvous, security, args.learners, args.min_learners, identity))
