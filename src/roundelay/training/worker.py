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

from roundelay.errors import RoundelayError
from roundelay.launch import World, gather_bytes
from roundelay.training import checkpoint, rundir
from roundelay.training.config import Config
from roundelay.training.desk import Address, Desk
from roundelay.training.door import SocketDoor, WorldDoor
from roundelay.training.recipes import read_toml, resolve
from roundelay.training.rendezvous import Rendezvous, RendezvousServer, open_listener
from roundelay.training.trainer import Trainer
from roundelay.transport.security import Security

# What the supervisor tells a learner: where the rendezvous is, what proves membership, which number it wants, where to listen.
ADDRESS, SECRET, NUMBER, HOST = "ROUNDELAY_RENDEZVOUS", "ROUNDELAY_SECRET", "ROUNDELAY_LEARNER", "ROUNDELAY_HOST"
STORE = "ROUNDELAY_STORE"  # where groups of collectives form, for strategies that have any
LOOPBACK = "127.0.0.1"
_ADDRESS_BYTES, _SECRET_BYTES = 64, 32


def learn(folder: Path, place: int | None) -> bool:
    """As a learner that the supervisor has started; True if the run was finished."""
    config = resolve(read_toml(folder / rundir.CONFIG))
    security = Security(bytes.fromhex(os.environ[SECRET]))
    number, store = os.environ.get(NUMBER), os.environ.get(STORE)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = os.environ.get(HOST, LOOPBACK)
    door = SocketDoor(host, security, local_size, None if store is None else parsed_address(store))
    with Rendezvous(parsed_address(os.environ[ADDRESS]), security) as line:
        living = line.register(door.open(), None if number is None else int(number)).membership
        assert line.id is not None
        joins = living.generation > 0
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        world = World(living.position(line.id), living.size, local_rank, min(local_size, living.size))
        resumed = None if place is None or joins else checkpoint.at(folder / "checkpoints", place)
        return Trainer(config, folder, world, line, door).run(resumed, joins=joins)


def join(config: Config, folder: Path, world: World, place: int | None) -> bool:
    """As one of the learners that torchrun or Slurm has started; learner 0 has the rendezvous."""
    security = Security(gather_bytes(secrets.token_bytes(_SECRET_BYTES), _SECRET_BYTES)[0])
    one_machine = world.local_size == world.size
    host = LOOPBACK if one_machine else socket.gethostbyname(socket.gethostname())
    listener = open_listener(host) if world.rank == 0 else None
    mine = f"{host}:{listener.getsockname()[1]}".encode() if listener else b""
    address = gather_bytes(mine, _ADDRESS_BYTES)[0].rstrip(b"\0").decode()
    if listener:
        desk = Desk(world.size, parties(config, world.size, world.local_size), time.monotonic)
        RendezvousServer(listener, security, desk)
    resumed = None if place is None else checkpoint.at(folder / "checkpoints", place)
    with Rendezvous(parsed_address(address), security) as line:
        line.register(("", 0), world.rank)
        return Trainer(config, folder, world, line, WorldDoor(world), elastic=False).run(resumed)


def parties(config: Config, size: int, local_size: int) -> list[int]:
    """Of every learner, its party: those that end with the same step; all, or a group, or itself."""
    members = size if config.synchronous else config.group_size or local_size
    return [rank // members for rank in range(size)]


def parsed_address(text: str) -> Address:
    """HOST:PORT."""
    host, port = text.rsplit(":", 1)
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
