"""One learner process of a run: started by the supervisor, or by torchrun or Slurm as `roundelay train` itself."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from pathlib import Path

import torch

import roundelay
from roundelay.errors import RoundelayError
from roundelay.launch import World, gather_bytes
from roundelay.training import checkpoint, rundir
from roundelay.training.config import Config
from roundelay.training.coordinator import Coordinator, CoordinatorServer
from roundelay.training.recipes import read_toml, resolve
from roundelay.training.trainer import Trainer
from roundelay.transport.security import Security

ADDRESS, SECRET = "ROUNDELAY_COORDINATOR", "ROUNDELAY_SECRET"
_ADDRESS_BYTES, _SECRET_BYTES = 64, 32


def learn(config: Config, folder: Path, world: World, coordinator: Coordinator, place: int | None) -> bool:
    """Train one learner, from the checkpoint at `place` if there is one; True if the run was finished."""
    resumed = None if place is None else checkpoint.at(folder / "checkpoints", place)
    return Trainer(config, folder, world, coordinator).run(resumed)


def join(config: Config, folder: Path, world: World, place: int | None) -> bool:
    """As one of the learners that torchrun or Slurm has started; learner 0 coordinates."""
    security = Security(gather_bytes(secrets.token_bytes(_SECRET_BYTES), _SECRET_BYTES)[0])
    one_machine = world.local_size == world.size
    host = "127.0.0.1" if one_machine else socket.gethostbyname(socket.gethostname())
    listener = socket.create_server((host, 0), backlog=world.size + 16) if world.rank == 0 else None
    mine = f"{host}:{listener.getsockname()[1]}".encode() if listener else b""
    address = gather_bytes(mine, _ADDRESS_BYTES)[0].rstrip(b"\0").decode()
    if listener:
        CoordinatorServer(listener, security, parties(config, world.size, world.local_size))
    return learn(config, folder, world, _coordinator(address, world.rank, security), place)


def parties(config: Config, size: int, local_size: int) -> list[int]:
    """Of every learner, its party: those that end with the same step; all, or a group, or itself."""
    members = size if config.synchronous else config.group_size or local_size
    return [rank // members for rank in range(size)]


def _coordinator(address: str, rank: int, security: Security) -> Coordinator:
    host, port = address.rsplit(":", 1)
    return Coordinator((host, int(port)), rank, security)


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
        config = resolve(read_toml(folder / rundir.CONFIG))
        world = roundelay.init()
        security = Security(bytes.fromhex(os.environ[SECRET]))
        coordinator = _coordinator(os.environ[ADDRESS], world.rank, security)
        learn(config, folder, world, coordinator, place)
    except RoundelayError as error:
        sys.stderr.write(f"roundelay: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None))
