"""How a learner is reached by the others, and reaches them: a listening socket for every term of the run."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from roundelay.cluster.environment import World, joined_store
from roundelay.cluster.rendezvous.client import View
from roundelay.cluster.rendezvous.server import open_listener
from roundelay.cluster.rendezvous.state import Address
from roundelay.transport.base import Collectives, Transport
from roundelay.transport.collectives import StoreCollectives
from roundelay.transport.security import Security
from roundelay.transport.tcp import TcpTransport


class TcpEndpoint:
    """Opens a socket, and makes a transport of it once it is known who takes part.

    Args:
        host: the interface to listen on.
        security: the run's.
        local_size: learners of this machine.
        store: where the groups of collectives find each other, for strategies that have any.
    """

    def __init__(self, host: str, security: Security, local_size: int, store: Address | None) -> None:
        self._host, self._security, self._local_size = host, security, local_size
        self._store_address = store
        self._store: Any = None
        self._listener: socket.socket | None = None

    def open(self) -> Address:
        """Listen; the transport comes later."""
        if self._listener is not None:
            self._listener.close()
        self._listener = open_listener(self._host)
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def connect(self, me: int, term: View, *, joins: bool) -> Transport:
        """To all others of the term."""
        assert self._listener is not None
        listener, self._listener = self._listener, None
        transport: TcpTransport

        def hopeless(members: tuple[int, ...]) -> bool:
            return transport.hopeless(members)

        store = self._connected_store()
        generation = term.membership.generation
        collectives = (
            _NoCollectives() if store is None else StoreCollectives(store, me, generation, self._host, hopeless)
        )
        transport = TcpTransport(
            me, term.membership.size, listener, self._security, collectives, local_size=self._local_size
        )
        others = {learner: address for learner, address in term.addresses.items() if learner != me}
        try:
            transport.join(others) if joins else transport.connect(others)
        except BaseException as error:
            transport.close(f"{type(error).__name__}: {error}")
            raise
        return transport

    def _connected_store(self) -> Any:  # noqa: ANN401
        if self._store is None and self._store_address is not None:
            self._store = joined_store(self._store_address)
        return self._store


class WorldEndpoint:
    """Where torchrun or Slurm has made the world, and no learner can come or go."""

    def __init__(self, world: World) -> None:
        self._world = world

    def open(self) -> Address:
        """Nobody needs to know."""
        return "", 0

    def connect(self, me: int, term: View, *, joins: bool) -> Transport:
        """To the whole world."""
        return self._world.transport()


class _NoCollectives(Collectives):
    """For strategies that only exchange between pairs."""

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Never asked for."""
        raise AssertionError("this run has no collectives")

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Never asked for."""
        raise AssertionError("this run has no collectives")

    def close(self) -> None:
        """Nothing to release."""
