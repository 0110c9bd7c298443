"""An endpoint listens for a learner's peers, and connects to the learners of a view."""

from __future__ import annotations

import functools
import os
import socket
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from roundelay.cluster.environment import World, joined_store
from roundelay.cluster.membership import Address, View
from roundelay.cluster.rendezvous.server import open_listener
from roundelay.errors import LaunchError
from roundelay.transport import handshake
from roundelay.transport.base import Collectives, Transport
from roundelay.transport.collectives import StoreCollectives
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.security import Security
from roundelay.transport.tcp import TcpTransport


class Endpoint(Protocol):
    """Makes a new transport for every view that a learner connects to.

    Call `open` first, and tell the address to the rendezvous. The rendezvous replies with a view; then call `connect`.
    """

    def open(self) -> Address:
        """Listen for the peers of the next transport, and return the address to tell them."""

    def connect(self, learner: int, view: View, *, joining: bool) -> Transport:
        """Connect this learner, whose id is `learner`, to all others of the view.

        With `joining`, the others already train and are connected to each other.

        Raises PeerLostError if a peer cannot be reached.
        """

    def reaches(self, learner: int, peer: int, address: Address) -> bool:
        """Whether this learner can connect to a peer that takes part already. Blocks for a few seconds if it cannot."""

    def close(self) -> None:
        """Stop listening, if a port was opened and not used."""


class TcpEndpoint:
    """An endpoint with Roundelay's own sockets, for runs in which learners may come and go.

    Args:
        host: the interface to listen on.
        security: the secret of the run.
        local_size: learners on this machine.
        store: address of the store through which process groups form; None for a strategy without collectives.
    """

    def __init__(self, host: str, security: Security, local_size: int, store: Address | None) -> None:
        self._host, self._security, self._local_size = host, security, local_size
        self._store = store
        self._listener: socket.socket | None = None

    def open(self) -> Address:
        """Listen on a new port; a port that was opened before and not used is closed."""
        self.close()
        self._listener = open_listener(self._host)
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def connect(self, learner: int, view: View, *, joining: bool) -> Transport:
        """Connect to all others of the view."""
        assert self._listener is not None
        listener, self._listener = self._listener, None
        transport: TcpTransport

        def hopeless(members: tuple[int, ...]) -> bool:
            return transport.hopeless(members)

        collectives: Collectives = _NoCollectives()
        if self._store is not None:
            open_store = functools.partial(joined_store, self._store)
            generation = view.membership.generation
            collectives = StoreCollectives(open_store, learner, generation, self._host, hopeless)
        transport = TcpTransport(
            learner, view.membership.size, listener, self._security, collectives, local_size=self._local_size
        )
        others = {peer: address for peer, address in view.addresses.items() if peer != learner}
        try:
            transport.join(others) if joining else transport.connect(others)
        except BaseException as error:
            transport.close(f"{type(error).__name__}: {error}")
            raise
        return transport

    def reaches(self, learner: int, peer: int, address: Address) -> bool:
        """Whether the peer answers a handshake."""
        hello = Hello(learner, Purpose.PROBE, os.getpid(), bytes(16))
        try:
            connection, _ = handshake.connect(address, hello, peer, self._security)
        except OSError:
            return False
        connection.close()
        return True

    def close(self) -> None:
        """Stop listening, if a port was opened and not used."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class WorldEndpoint:
    """The endpoint of a world that torchrun or Slurm has started, whose membership is fixed."""

    def __init__(self, world: World) -> None:
        self._world = world

    def open(self) -> Address:
        """There is nothing to open: the world exchanges addresses by itself."""
        return "", 0

    def connect(self, learner: int, view: View, *, joining: bool) -> Transport:
        """Connect to the whole world."""
        return self._world.transport()

    def reaches(self, learner: int, peer: int, address: Address) -> bool:
        """A world whose membership is fixed has no learners that join."""
        return True

    def close(self) -> None:
        """There is nothing to close."""


class _NoCollectives(Collectives):
    """For runs without a store: Gloo and NCCL have no authentication, so the user must allow them."""

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Raises LaunchError."""
        raise _not_allowed()

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Raises LaunchError."""
        raise _not_allowed()

    def close(self) -> None:
        """There is nothing to release."""


def _not_allowed() -> LaunchError:
    return LaunchError(
        "this sums over learners by Gloo or NCCL, which have no authentication, and the rendezvous does not allow that: start it "
        "with open_collectives=True (--open-collectives) in a network that you trust"
    )
