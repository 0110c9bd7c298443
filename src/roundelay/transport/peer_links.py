"""Links to peers: connections for heartbeats, opened at the start, when a learner joins, and again after a cut."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping

from roundelay.errors import PeerLostError
from roundelay.transport.base import Address
from roundelay.transport.connections import Connections
from roundelay.transport.failure_detector import FailureDetector
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.healing import Healing
from roundelay.transport.liveness import Liveness

ARRIVAL_S = 20.0  # long: learners connect right after they have found each other


class PeerLinks:
    """Gives the failure detector one connection per peer.

    Args:
        rank: this learner.
        connections: opens connections to the peers.
        liveness: which peers are gone.
        detector: exchanges heartbeats over the connections.
    """

    def __init__(self, rank: int, connections: Connections, liveness: Liveness, detector: FailureDetector) -> None:
        self._rank, self._connections, self._liveness, self._detector = rank, connections, liveness, detector
        self._healing: Healing | None = None

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Connect to the peers of higher rank, and wait until the others have connected to us.

        Raises PeerLostError if a peer does not answer or never connects.
        """
        self._connections.set_addresses(addresses)
        for peer in addresses:
            if peer > self._rank:
                try:
                    self._open(peer)
                except OSError as error:
                    raise PeerLostError(peer, f"it does not answer ({error})") from error
        absent = self._detector.wait_for((peer for peer in addresses if peer < self._rank), ARRIVAL_S)
        if absent is not None:
            raise PeerLostError(absent, f"it has not connected within {ARRIVAL_S:g} s")

    def join(self, addresses: Mapping[int, Address], lose: Callable[[int, str], None]) -> None:
        """Connect to all peers. `lose` is called with a peer that does not answer, and why."""
        self._connections.set_addresses(addresses)
        for peer in addresses:
            try:
                self._open(peer)
            except OSError as error:
                lose(peer, f"it does not answer ({error})")

    def accepted(self, connection: socket.socket, hello: Hello) -> None:
        """A peer has opened a connection that is not for requests."""
        if hello.purpose == Purpose.HEARTBEAT:
            self._detector.add(hello.rank, connection)
        elif hello.purpose == Purpose.RECONNECT:
            self._reached(hello.rank, connection)
        else:  # the peer only wanted to know whether it reaches us
            connection.close()

    def keep_reaching(self, wanted: Callable[[], Iterable[int]], report: Callable[[int, bool], None]) -> None:
        """Connect again and again to peers of `wanted()` that are lost, in a thread."""
        self._healing = Healing(self._rank, lambda: self._liveness.lost, wanted, self._reach, report)
        self._healing.start()

    def close(self) -> None:
        """Try to reach no more peers."""
        if self._healing is not None:
            self._healing.close()

    def _open(self, peer: int) -> None:
        self._detector.add(peer, self._connections.open_heartbeat(peer))

    def _reach(self, peer: int) -> bool:
        try:
            connection = self._connections.open_heartbeat(peer, Purpose.RECONNECT)
        except OSError:
            return False
        self._reached(peer, connection)
        return True

    def _reached(self, peer: int, connection: socket.socket) -> None:
        """The peer that was lost answers, at the same address."""
        self._liveness.admit(peer)
        self._connections.reopen(peer)
        self._detector.add(peer, connection)
