"""One learner process of a run: started by the supervisor, or by torchrun or Slurm as `roundelay train` itself."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch

from roundelay.cluster.endpoint import TcpEndpoint, WorldEndpoint
from roundelay.cluster.environment import World, gather_bytes
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
from roundelay.cluster.rendezvous.state import Address, RendezvousState
from roundelay.elastic import run_of
from roundelay.errors import LaunchError, RoundelayError
from roundelay.training import checkpoint, run_directory
from roundelay.training.config import Config
from roundelay.training.recipes import read_toml, resolve, task_of
from roundelay.training.trainer import Trainer
from roundelay.transport.security import Security

# What the supervisor tells a learner, beside the secret: where the rendezvous is, which number it wants, where to listen.
ADDRESS, NUMBER, HOST = "ROUNDELAY_RENDEZVOUS", "ROUNDELAY_LEARNER", "ROUNDELAY_HOST"
LOOPBACK = "127.0.0.1"
_ADDRESS_BYTES, _SECRET_BYTES = 64, 32


def learn(folder: Path, place: int | None) -> bool:
    """As a learner that the supervisor has started; True if the run was finished."""
    config = resolve(read_toml(folder / run_directory.CONFIG))
    security = Security.from_environment()
    assert security is not None
    task = task_of(config)  # before others count on this learner
    number, local_size = os.environ.get(NUMBER), int(os.environ["LOCAL_WORLD_SIZE"])
    with RendezvousClient(parsed_address(os.environ[ADDRESS]), security) as line:
        store = line.ask_for_info().get("store")
        if config.collective and store is None:
            raise LaunchError(
                f"{config.strategy} sums over learners by Gloo or NCCL, which know no secret; this rendezvous does not allow "
                "that: start it with --open-collectives in a network you trust, or use adpsgd"
            )
        host = os.environ.get(HOST, LOOPBACK)
        door = TcpEndpoint(host, security, local_size, store if config.collective else None)
        living = line.register(run_of(config), door.open(), None if number is None else int(number)).membership
        assert line.id is not None
        here = living.size if host == LOOPBACK else min(local_size, living.size)
        world = World(living.position(line.id), living.size, int(os.environ["LOCAL_RANK"]), here)
        resumed = None if place is None or line.joins else checkpoint.at(folder / "checkpoints", place)
        return Trainer(config, folder, task, world, client=line, endpoint=door).run(resumed, joins=line.joins)


def join(config: Config, folder: Path, world: World, place: int | None) -> bool:
    """As one of the learners that torchrun or Slurm has started; learner 0 has the rendezvous."""
    drawn = gather_bytes(secrets.token_bytes(_SECRET_BYTES), _SECRET_BYTES)[0]
    security = Security.from_environment() or Security(drawn)
    one_machine = world.local_size == world.size
    host = LOOPBACK if one_machine else socket.gethostbyname(socket.gethostname())
    listener = open_listener(host) if world.rank == 0 else None
    mine = f"{host}:{listener.getsockname()[1]}".encode() if listener else b""
    address = gather_bytes(mine, _ADDRESS_BYTES)[0].rstrip(b"\0").decode()
    if listener:
        RendezvousServer(listener, security, RendezvousState(time.monotonic))
    resumed = None if place is None else checkpoint.at(folder / "checkpoints", place)
    with RendezvousClient(parsed_address(address), security) as line:
        line.register(run_of(config, world.local_size), ("", 0), world.rank)
        trainer = Trainer(
            config, folder, task_of(config), world, client=line, endpoint=WorldEndpoint(world), elastic=False
        )
        return trainer.run(resumed)


def parsed_address(text: str) -> Address:
    """HOST:PORT. Raises LaunchError for anything else."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise LaunchError(f"an address is HOST:PORT, such as 10.0.0.1:29400, got '{text}'")
    return host, int(port)


def _stop_with_the_supervisor() -> None:
    """The supervisor holds the other end of stdin; when that closes, it has gone, and the run is saved and ended."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="roundelay-supervisor", daemon=True).start()


def main(folder: Path, place: int | None) -> int:
    """A learner that the supervisor has started."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _stop_with_the_supervisor()
    try:
        learn(folder, place)
    except RoundelayError as error:
        sys.stderr.write(f"roundelay: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None))
