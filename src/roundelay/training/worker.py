"""One learner process of a run. The supervisor starts it, and sends it everything that it must know in one line on stdin.

Under torchrun or Slurm there is no supervisor: `roundelay train` itself is the learner process.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from roundelay import threads
from roundelay.cluster.elastic_world import LEARNER
from roundelay.cluster.endpoint import TcpEndpoint, WorldEndpoint
from roundelay.cluster.environment import LOOPBACK, World, gather_bytes, parsed_address
from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.cluster.rendezvous.members import RunSpec
from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
from roundelay.cluster.rendezvous.state import RendezvousState
from roundelay.errors import LaunchError, RoundelayError
from roundelay.training import checkpoint
from roundelay.training.build import strategy_of
from roundelay.training.config import Config
from roundelay.training.recipes import from_table, task_of
from roundelay.training.trainer import Trainer
from roundelay.transport.security import Security

_ADDRESS_BYTES, _SECRET_BYTES = 64, 32


@dataclass(frozen=True)
class WorkerSpec:
    """What the supervisor tells a worker process.

    It travels through a pipe, because the environment of a process is inherited by every command that the process starts,
    and the specification holds the secret.

    Attributes:
        config: the configuration as plain values, checked by the supervisor.
        folder: the run's directory.
        resume_at: samples seen at the checkpoint to resume from; None begins a new run.
        rendezvous: address of the rendezvous.
        security: the secret of the run, as `Security.environment` gives it.
        host: the interface to listen on.
        learner: the id of this learner; None lets the rendezvous choose.
        local_rank: rank among the learners of this machine.
        local_size: number of learners on this machine.
        run: the identity of the run, which tells it apart from other runs at the same rendezvous.
        joins: the run is under way.
        process: the name under which the supervisor reports the end of this process.
    """

    config: dict[str, Any]
    folder: str
    resume_at: int | None
    rendezvous: Address
    security: dict[str, str]
    host: str
    learner: int | None
    local_rank: int
    local_size: int
    run: str = ""
    joins: bool = False
    process: str = ""

    def to_line(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> WorkerSpec:
        """Parse the line that `to_line` wrote."""
        values = json.loads(line)
        return cls(**values | {"rendezvous": tuple(values["rendezvous"])})


def train_supervised(spec: WorkerSpec) -> bool:
    """Train as a learner that the supervisor has started; True if the budget was used up.

    Raises LaunchError if the strategy needs collectives and the rendezvous allows none.
    """
    config, folder = from_table(spec.config), Path(spec.folder)
    security = Security.from_environment(spec.security)
    assert security is not None
    task = task_of(config)  # may take long; before `register`, no other learner waits for this one
    with RendezvousClient(spec.rendezvous, security) as client:
        store = client.ask_for_info().get("store")
        collectives = strategy_of(config, spec.local_size).uses_collectives
        if collectives and store is None:
            raise LaunchError(
                f"{config.strategy} sums over learners by Gloo or NCCL, which have no authentication, and this rendezvous does "
                "not allow that: start it with --open-collectives in a network that you trust, or use adpsgd"
            )
        endpoint = TcpEndpoint(spec.host, security, spec.local_size, store if collectives else None)
        run = run_spec(config, identity=spec.run)
        view = client.register(run, endpoint.open(), spec.learner, joins=spec.joins, process=spec.process)
        living = view.membership
        assert client.id is not None
        os.environ[LEARNER] = str(client.id)
        local_size = living.size if spec.host == LOOPBACK else min(spec.local_size, living.size)
        world = World(living.position(client.id), living.size, spec.local_rank, local_size)
        resume_at = None if client.joining else spec.resume_at  # a learner that joins takes its weights from the others
        resumed = None if resume_at is None else checkpoint.at(folder / "checkpoints", resume_at)
        trainer = Trainer(config, folder, task, world, client=client, endpoint=endpoint)
        return trainer.run(resumed, joins=client.joining, guest=spec.joins)


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
        trainer = Trainer(config, folder, task_of(config), world, client=client, endpoint=endpoint, elastic=False)
        return trainer.run(resumed)


def run_spec(config: Config, local_size: int | None = None, *, identity: str = "") -> RunSpec:
    """What the rendezvous must know about a run.

    With a synchronous strategy all learners are one stop group. Otherwise every super-learner is its own stop group.
    """
    size = config.learners
    synchronous = strategy_of(config, local_size).synchronous
    members = size if synchronous else config.group_size or local_size or size
    return RunSpec(size, tuple(learner // members for learner in range(size)), config.min_learners, identity)


def _stop_with_the_supervisor() -> None:
    """Save and stop when the supervisor has ended. Its end closes stdin, which a thread waits for."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threads.start("supervisor-watch", wait)


def main() -> int:
    """Run the worker process; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    spec = WorkerSpec.from_line(sys.stdin.buffer.readline())
    _stop_with_the_supervisor()
    try:
        train_supervised(spec)
    except RoundelayError as error:
        sys.stderr.write(f"roundelay: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
