"""`roundelay train`: start a run from a recipe, resume it, or add a learner to it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundelay.cli.arguments import (
    add_configuration,
    add_recipe,
    add_security,
    configured,
    connection_settings,
    dated_folder,
    positive_int,
    rendezvous_address,
    security_options,
)
from roundelay.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from roundelay.training.config import Config
    from roundelay.training.verdict import Ending

NEWEST = -1  # --resume without a number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    meaning = "a built-in recipe (see below), a .toml file, or a task as module:Class; not needed with --resume"
    add_recipe(parser, meaning, optional=True)
    add_configuration(parser)
    add("--out", type=Path, metavar="DIR", help="the run's directory (default: runs/RECIPE-DATE-TIME)")
    add(
        "--resume",
        type=positive_int,
        nargs="?",
        const=NEWEST,
        metavar="SAMPLES",
        help="continue the run in --out from its newest checkpoint, or from the checkpoint at SAMPLES samples",
    )
    add("--join", metavar="RUN", help="add a learner to a run under way: its directory, or HOST:PORT of its rendezvous")
    add("--rendezvous", metavar="HOST:PORT", help="the server of a run on several machines; see `roundelay rendezvous`")
    add("--here", type=positive_int, metavar="N", help="with --rendezvous: learners to start on this machine")
    add_security(parser)
    add("--json", action="store_true", help="print the results as JSON; progress goes to stderr as always")
    add("--show-config", action="store_true", help="print the whole configuration as TOML, and start nothing")


def run(args: argparse.Namespace) -> int:
    """Check the configuration, then start learners, or train as one of those that torchrun or Slurm has started."""
    from roundelay.cluster.environment import adopt_slurm
    from roundelay.training import recipes, run_directory
    from roundelay.training.config_table import to_toml

    if args.join is not None:
        return _join_run(args)
    if args.rendezvous is None:  # with one, this process starts learners and is none itself, also under srun
        adopt_slurm()
    if args.recipe is None and args.resume is None:
        raise UsageError("train needs a RECIPE, such as tiny, or --out DIR --resume, or --join RUN")
    if args.resume is not None and args.out is None:
        raise UsageError("--resume needs --out, the directory of the run to continue")
    table = recipes.table_of(args.recipe) if args.resume is None else run_directory.table(args.out)
    _check_same_task(args, table)
    config = recipes.resolve(table, configured(args), data=not args.show_config)
    if args.show_config:
        print(to_toml(recipes.as_table(config)), end="")
        return 0
    folder: Path = args.out or dated_folder(args.recipe)
    launched = args.rendezvous is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    with contextlib.ExitStack() as lock:
        if launched:
            return _train_in_world(config, folder, args, lock)
        return _supervise(config, folder, args, lock)


def _check_same_task(args: argparse.Namespace, table: dict[str, Any]) -> None:
    """Raise UsageError if a RECIPE is given to resume a run of another task. The run keeps its own configuration."""
    from roundelay.training import recipes

    if args.recipe is None or args.resume is None:
        return
    wanted, found = recipes.table_of(args.recipe).get("task"), table.get("task")
    if wanted != found:
        raise UsageError(
            f"the run in '{args.out}' has the task {found}, but '{args.recipe}' has {wanted}; leave out '{args.recipe}', "
            "or begin a new run with another --out"
        )


def _supervise(config: Config, folder: Path, args: argparse.Namespace, lock: contextlib.ExitStack) -> int:
    from roundelay.training import run_directory
    from roundelay.training.open_files import allow_open_files
    from roundelay.training.resuming import Resume
    from roundelay.training.supervisor import Supervisor

    allow_open_files(config.learners)
    settings = connection_settings(args, None if args.rendezvous is None else rendezvous_address(args.rendezvous))
    if args.rendezvous is None:
        if args.here is not None:
            raise UsageError("--here goes with --rendezvous; without one all learners are started on this machine")
        resume = Resume(_prepare(config, folder, args, lock))
        if args.resume is None:
            print(f"run: {folder}", file=sys.stderr)
        again = run_directory.resume_command(folder, security_options(args))
        return _tell(Supervisor(config, folder, resume, settings=settings, resume_command=again).run(), args)
    learners, metrics = _learners_here(config, args), _take_directory(config, folder, args, lock)
    resume = Resume(None if args.resume == NEWEST else args.resume, together=args.resume is not None)
    options = ["--rendezvous", args.rendezvous, "--here", str(len(learners)), *security_options(args)]
    again = run_directory.resume_command(folder, options)
    supervisor = Supervisor(
        config, folder, resume, settings=settings, learners=learners, resume_command=again, metrics=metrics
    )
    return _tell(supervisor.run(), args)


def _tell(ending: Ending, args: argparse.Namespace) -> int:
    """Print the results to stdout, or to stderr what stopped the run; returns the exit code."""
    said, code = ending.verdict()
    results = ending.results()
    if code == 0 and args.json and results is not None:
        print(json.dumps(results, indent=2))
    else:
        (sys.stderr if code or args.json else sys.stdout).write(said)
    return code


def _learners_here(config: Config, args: argparse.Namespace) -> list[int | None]:
    """Learners to start on this machine; the rendezvous chooses their ids."""
    here = args.here or config.learners
    if here > config.learners:
        raise UsageError(f"--here {here} is more than the {config.learners} learners of the run; see --learners")
    return [None] * here


def _take_directory(config: Config, folder: Path, args: argparse.Namespace, lock: contextlib.ExitStack) -> str:
    """Make the run's directory on this machine ready. If machines share one directory, the first one begins the run there.

    Returns the name of the file of metrics of this machine.

    Raises ConfigError if the directory holds another run, or if the run cannot go on with `config`.
    """
    from roundelay.training import recipes, run_directory, run_lock
    from roundelay.training.directory_server import machine_name
    from roundelay.training.resume_check import check_resume_here

    if args.out is None:
        raise UsageError(
            "with --rendezvous --out must be given: the run's directory on this machine, with the same name on all machines"
        )
    command = shlex.join(["roundelay", *sys.argv[1:]])
    run_directory.make(folder)
    if lock.enter_context(run_lock.hold(folder, shared=True)):
        if args.resume is None:
            run_directory.begin(folder, config, command)
        else:
            check_resume_here(recipes.resolve(run_directory.table(folder)), config, folder / "checkpoints")
            run_directory.write(folder, config, command)
        return run_directory.METRICS
    run_directory.wait_for_config(folder)  # a machine that sees this directory, too, has begun the run a moment ago
    if recipes.as_table(recipes.resolve(run_directory.table(folder))) != recipes.as_table(config):
        raise ConfigError(f"'{folder}' is in use by a run with another configuration; choose another --out")
    return f"metrics-{machine_name(folder)}.jsonl"


def _join_run(args: argparse.Namespace) -> int:
    """Add a learner to a run that is under way."""
    from roundelay.cluster.rendezvous.client import RendezvousClient
    from roundelay.training import recipes, run_directory
    from roundelay.training.open_files import allow_open_files
    from roundelay.training.supervisor import Supervisor

    address, security, folder = args.join, None, args.out
    if Path(args.join).is_dir():
        folder = folder or Path(args.join)
        ticket = run_directory.ticket(Path(args.join))
        address, security = "{}:{}".format(*ticket.address), ticket.credentials()
    elif ":" not in address:
        raise UsageError(
            f"--join needs the directory of a run, or HOST:PORT of its rendezvous; there is no '{address}'"
        )
    settings = connection_settings(args, rendezvous_address(address), security)
    try:
        with RendezvousClient(rendezvous_address(address), settings.security) as client:
            info = client.ask_for_info()
    except OSError as error:
        raise UsageError(f"cannot join the run at {address}: {error}") from None
    if not info.get("run"):
        raise UsageError(
            f"the rendezvous at {address} has no run under way; start one with "
            f"`roundelay train RECIPE --out DIR --rendezvous {address}`"
        )
    if "config" not in info:
        raise UsageError(
            f"the run at {address} was not started by `roundelay train`; start your own script with `roundelay launch`"
        )
    config = recipes.resolve(info["config"])
    folder = folder or Path(info["folder"])
    allow_open_files(config.learners)
    if config.group_size != 1:
        raise UsageError("a learner cannot join a run of super-learners, because a group cannot change")
    metrics = _join_directory(config, folder)
    print(f"joining: {folder}", file=sys.stderr)
    out = [] if args.out is None else ["--out", str(args.out)]
    again = shlex.join(["roundelay", "train", "--join", args.join, *out, *security_options(args)])
    supervisor = Supervisor(
        config, folder, settings=settings, learners=[None], joins=info["run"], resume_command=again, metrics=metrics
    )
    return _tell(supervisor.run(), args)


def _join_directory(config: Config, folder: Path) -> str:
    """Make a directory for a learner that joins, or use the one of the run. Returns the name of the file of metrics."""
    from roundelay.training import recipes, run_directory

    if not (folder / run_directory.CONFIG).exists():
        run_directory.begin(folder, config, shlex.join(["roundelay", *sys.argv[1:]]))
    elif recipes.as_table(recipes.resolve(run_directory.table(folder))) != recipes.as_table(config):
        raise ConfigError(f"'{folder}' holds a run with another configuration; choose another --out")
    return run_directory.METRICS


def _train_in_world(config: Config, folder: Path, args: argparse.Namespace, lock: contextlib.ExitStack) -> int:
    """Train as one of the learners that torchrun or Slurm has started."""
    import logging

    from roundelay.cluster.environment import gather_bytes, init
    from roundelay.training import recipes, run_directory, worker
    from roundelay.training.verdict import Ending

    if args.out is None:
        raise UsageError("under torchrun or Slurm --out must be given, so that all learners write to one run")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    world = init()
    config = dataclasses.replace(config, learners=world.size)
    recipes.check(config)
    resume_at, failure = b"", ""
    if world.rank == 0:
        try:
            found = _prepare(config, folder, args, lock)
            resume_at = b"" if found is None else str(found).encode()
        except ConfigError as error:
            failure = str(error)
    failed = gather_bytes(failure.encode()[:500], 500)[0].rstrip(b"\0").decode(errors="replace")
    if failed:
        raise ConfigError(failed)
    received = gather_bytes(resume_at, 32)[0].rstrip(b"\0")
    finished = worker.train_in_world(config, folder, world, int(received) if received else None)
    again = run_directory.resume_command(folder)
    if world.rank == 0 and finished:
        return _tell(Ending(folder, again, None, "", {}, world.size, joined=False), args)
    if world.rank == 0:
        print(f"stopped and saved; go on with:\n  {again}", file=sys.stderr)
    return 0


def _prepare(config: Config, folder: Path, args: argparse.Namespace, lock: contextlib.ExitStack) -> int | None:
    """Make the run's directory ready, and lock it; returns the samples seen at the checkpoint to resume from.

    Raises ConfigError, with nothing changed, if another command trains there, or if the run cannot go on with `config`.
    """
    from roundelay.training import checkpoint, recipes, run_directory, run_lock
    from roundelay.training.resume_check import check_resume

    command = shlex.join(["roundelay", *sys.argv[1:]])
    if args.resume is None:
        run_directory.make(folder)
        lock.enter_context(run_lock.hold(folder))
        run_directory.begin(folder, config, command)
        return None
    lock.enter_context(run_lock.hold(folder))
    chosen = checkpoint.choose(folder / "checkpoints", None if args.resume == NEWEST else args.resume)
    check_resume(recipes.resolve(run_directory.table(folder)), config, chosen)
    checkpoint.abandon_after(folder / "checkpoints", chosen.samples_seen)
    run_directory.write(folder, config, command)
    print(f"going on with {folder} after {chosen.samples_seen:,} samples", file=sys.stderr)
    if len(chosen.files) != config.learners:
        print(f"{config.learners} learners go on from the mean of the {len(chosen.files)} that saved", file=sys.stderr)
    return chosen.samples_seen
