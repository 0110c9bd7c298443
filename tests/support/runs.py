"""Whole runs in one process: every learner a thread, real sockets on the loopback, a real rendezvous."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from loopback import loopback, together

from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.cluster.rendezvous.server import RendezvousServer
from roundelay.cluster.rendezvous.state import RendezvousState
from roundelay.training import checkpoint, run_directory
from roundelay.training.config import Config
from roundelay.training.other_machines import RunFiles
from roundelay.training.recipes import resolve, task_of
from roundelay.training.trainer import Trainer
from roundelay.training.worker import run_spec
from roundelay.transport.base import Transport
from roundelay.transport.security import Security
from roundelay.transport.solo import SoloTransport

_SEEDING = threading.Lock()  # threads share torch's random generator, which the first weights are drawn from
TINY = {"task": "roundelay.training.tiny:Digits", "settings": {"dropout": 0.0, "hidden": 16}}


@dataclass(frozen=True)
class ThreadWorld:
    """A World and an Endpoint whose transport exists already."""

    rank: int
    size: int
    given: Transport

    local_rank = property(lambda self: self.rank)
    local_size = property(lambda self: self.size)
    device = torch.device("cpu")

    def open(self) -> tuple[str, int]:
        return "", 0

    def connect(self, learner: int, view: object, *, joining: bool) -> Transport:
        return self.given


def tiny_config(**keys: object) -> Config:
    """The digits, with top-level keys or tables of the configuration."""
    return resolve(TINY | keys)


def run_in_threads(
    config: Config,
    folder: Path,
    samples_seen: int | None = None,
    prepare: Callable[[Trainer], None] = lambda trainer: None,
) -> list[Trainer]:
    """Train, from the checkpoint at `samples_seen` if given; afterwards the trainers, in order of rank."""
    if not (folder / run_directory.CONFIG).exists():
        run_directory.begin(folder, config, "a test")
    size, security, listener = (
        config.learners,
        Security(secrets.token_bytes(32)),
        socket.create_server(("127.0.0.1", 0)),
    )
    server = RendezvousServer(listener, security, RendezvousState(time.monotonic))
    resumed = None if samples_seen is None else checkpoint.at(folder / "checkpoints", samples_seen)
    if samples_seen is not None:
        checkpoint.abandon_after(folder / "checkpoints", samples_seen)

    def learn(rank: int, transport: Transport) -> Trainer:
        world = ThreadWorld(rank, size, transport)
        with RendezvousClient(server.address, security) as client:
            client.register(run_spec(config), ("", 0), rank)
            with _SEEDING:
                task = task_of(config)
                trainer = Trainer(config, RunFiles(folder), task, world, client=client, endpoint=world, elastic=False)  # type: ignore[arg-type]
            prepare(trainer)
            trainer.finished = trainer.run(resumed)  # type: ignore[attr-defined]
            return trainer

    try:
        if size == 1:
            return [learn(0, SoloTransport())]
        with loopback(size) as transports:
            return together(size, lambda rank: learn(rank, transports[rank]))
    finally:
        server.close()
