"""One learner process of `roundelay train`: the program that the launcher starts, with a ticket in the environment.

Under torchrun or Slurm there is no launcher: `roundelay train` itself is the learner process.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from roundelay.cluster.elastic_world import LEARNER, register, wanted_id
from roundelay.cluster.endpoint import WorldEndpoint
from roundelay.cluster.environment import LOOPBACK, World, gather_bytes, parsed_address
from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.cluster.rendezvous.members import RunSpec
from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
from roundelay.cluster.rendezvous.state import RendezvousState
from roundelay.cluster.ticket import Ticket
from roundelay.errors import LaunchError, RoundelayError
from roundelay.training import checkpoint, run_directory
from roundelay.training.build import strategy_of
from roundelay.training.config import Config
from roundelay.training.other_machines import OtherMachines, RunFiles
from roundelay.training.recipes import as_table, from_table, task_of
from roundelay.training.resuming import Resume
from roundelay.training.trainer import Trainer
from roundelay.transport.security import Security

_ADDRESS_BYTES, _SECRET_BYTES = 64, 32
_NO_COLLECTIVES = (
    "{} sums over learners by Gloo or NCCL, which have no authentication, and this rendezvous does not allow that: start it "
    "with --open-collectives in a network that you trust, or use adpsgd"
)


def train_launched(ticket: Ticket, folder: Path, metrics: str, files: Address, resume: Resume, *, guest: bool) -> bool:
    """Train as a learner that the launcher has started; True if the budget was used up.

    Args:
        ticket: of the run.
        folder: of the run; its configuration was checked when it was written.
        metrics: the name of the file of metrics in `folder`.
        files: where the supervisor serves `folder` to other machines.
        resume: the checkpoint to resume from.
        guest: the learner did not begin the run, and joins it.

    Raises LaunchError if the strategy needs collectives and the rendezvous allows none.
    """
    config = from_table(run_directory.table(folder))
    task = task_of(config)  # may take long; before `register`, no other learner waits for this one
    with RendezvousClient(ticket.address, ticket.credentials()) as client:
        collectives = strategy_of(config, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))).uses_collectives
        if collectives and client.ask_for_info().get("store") is None:
            raise LaunchError(_NO_COLLECTIVES.format(config.strategy))
        run = run_spec(config, identity=ticket.run, folder=folder)
        world = register(client, ticket, run, wanted_id(), collectives=collectives, joins=guest, files=files)
        # A learner that joins takes its weights from the others.
        resumed = None if client.joining else resume.checkpoint(client, folder, files, ticket.credentials())
        assert client.view is not None
        assert world.endpoint is not None
        living = client.view.membership
        os.environ[LEARNER] = str(world.rank)
        local_size = living.size if ticket.address[0] == LOOPBACK else min(world.local_size, living.size)
        here = replace(world, rank=living.position(world.rank), size=living.size, local_size=local_size)
        own = RunFiles(folder, metrics, OtherMachines(folder, client, files, ticket.credentials()))
        trainer = Trainer(config, own, task, here, client=client, endpoint=world.endpoint)
        return trainer.run(resumed, joins=client.joining, guest=guest)


def train_in_world(config: Config, folder: Path, world: World, resume_at: int | None) -> bool:
    """Train as one of the learners that torchrun or Slurm has started; True if the budget was used up.

    Learner 0 runs the rendezvous.
    """
    drawn = gather_bytes(secrets.token_bytes(_SECRET_BYTES), _SECRET_BYTES)[0]
    security = Security.from_environment() or Security(drawn)
    one_machine = world.local_size == world.size
    host = LOOPBACK if one_machine else socket.gethostbyname(socket.gethostname())
    listener = open_listener(host) if world.rank == 0 else None
    mine = f"{host}:{listener.getsockname()[1]}".encode() if listener else b""
    address = gather_bytes(mine, _ADDRESS_BYTES)[0].rstrip(b"\0").decode()
    if listener:
        RendezvousServer(listener, security, RendezvousState(time.monotonic))
    resumed = None if resume_at is None else checkpoint.at(folder / "checkpoints", resume_at)
    with RendezvousClient(parsed_address(address), security) as client:
        client.register(run_spec(config, world.local_size), ("", 0), world.rank)
        endpoint = WorldEndpoint(world)
        metrics = run_directory.METRICS if one_machine else f"metrics-{world.rank // world.local_size}.jsonl"
        own = RunFiles(folder, metrics)
        trainer = Trainer(config, own, task_of(config), world, client=client, endpoint=endpoint, elastic=False)
        return trainer.run(resumed)


def run_spec(
    config: Config, local_size: int | None = None, *, identity: str = "", folder: Path | None = None
) -> RunSpec:
    """What the rendezvous must know about a run.

    With a synchronous strategy all learners are one stop group. Otherwise every super-learner is its own stop group.
    """
    size = config.learners
    synchronous = strategy_of(config, local_size).synchronous
    members = size if synchronous else config.group_size or local_size or size
    stop_groups = tuple(learner // members for learner in range(size))
    about = {} if folder is None else {"folder": str(folder.resolve()), "config": as_table(config)}
    return RunSpec(size, stop_groups, config.min_learners, identity, about)


def main() -> int:
    """Run the learner process; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="roundelay.training.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("metrics")
    parser.add_argument("--files", type=parsed_address, required=True)
    parser.add_argument("--resume-at", type=int)
    parser.add_argument("--resume-together", action="store_true")
    parser.add_argument("--guest", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        ticket = Ticket.from_environment()
        if ticket is None:
            raise LaunchError("there is no ticket; `roundelay train` starts this program with one")
        resume = Resume(args.resume_at, together=args.resume_together)
        train_launched(ticket, args.folder, args.metrics, args.files, resume, guest=args.guest)
    except RoundelayError as error:
        sys.stderr.write(f"roundelay: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
