"""Whole runs in one process: every learner a thread, real sockets on the loopback, a real coordinator."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from loopback import loopback, together

from roundelay.training import checkpoint, rundir
from roundelay.training.config import Config
from roundelay.training.coordinator import Coordinator, CoordinatorServer
from roundelay.training.recipes import resolve
from roundelay.training.trainer import Trainer
from roundelay.training.worker import parties
from roundelay.transport.base import Transport
from roundelay.transport.security import Security
from roundelay.transport.solo import SoloTransport

_SEEDING = threading.Lock()  # processes have a generator each; threads share torch's, with which weights are drawn
TINY = {"task": "roundelay.training.tiny:Digits", "settings": {"dropout": 0.0, "hidden": 16}}


@dataclass(frozen=True)
class ThreadWorld:
    """As launch.World, with a transport that is there already."""

    rank: int
    size: int
    given: Transport

    local_rank = property(lambda self: self.rank)
    local_size = property(lambda self: self.size)
    device = torch.device("cpu")

    def transport(self) -> Transport:
        return self.given


def tiny_config(**keys: object) -> Config:
    """The digits, with top-level keys or tables of the configuration."""
    return resolve(TINY | keys)


def run_in_threads(
    config: Config, folder: Path, place: int | None = None, prepare: Callable[[Trainer], None] = lambda trainer: None
) -> list[Trainer]:
    """Train, from the checkpoint at `place` if given; afterwards the trainers, in order of rank."""
    if not (folder / rundir.CONFIG).exists():
        rundir.begin(folder, config, "a test")
    size, security, listener = (
        config.learners,
        Security(secrets.token_bytes(32)),
        socket.create_server(("127.0.0.1", 0)),
    )
    server = CoordinatorServer(listener, security, parties(config, size, size))
    resumed = None if place is None else checkpoint.at(folder / "checkpoints", place)
    if place is not None:
        checkpoint.abandon_after(folder / "checkpoints", place)

    def learn(rank: int, transport: Transport) -> Trainer:
        coordinator = Coordinator(listener.getsockname()[:2], rank, security)
        with _SEEDING:
            trainer = Trainer(config, folder, ThreadWorld(rank, size, transport), coordinator)  # type: ignore[arg-type]
        prepare(trainer)
        try:
            trainer.finished = trainer.run(resumed)  # type: ignore[attr-defined]
        finally:
            coordinator.close()
        return trainer

    try:
        if size == 1:
            return [learn(0, SoloTransport())]
        with loopback(size) as transports:
            return together(size, lambda rank: learn(rank, transports[rank]))
    finally:
        server.close()
