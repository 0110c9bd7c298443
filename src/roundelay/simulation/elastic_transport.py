"""A learner's transport and endpoint in an elastic run on the virtual clock.

Failure detection decides by the same `Heartbeats` as between processes, and links heal by the same `Healing`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import cast

from torch import Tensor

from roundelay import waiting
from roundelay.cluster.membership import Address, View
from roundelay.errors import PeerLostError, RefusedError
from roundelay.simulation.elastic_network import ElasticNetwork
from roundelay.simulation.virtual_threads import VirtualProcess
from roundelay.transport.base import GAVE_UP, LEFT, Begin, Call, Transport
from roundelay.transport.healing import RETRY_S, Healing
from roundelay.transport.heartbeats import BEAT_S, NO_HEARTBEAT, Heartbeats
from roundelay.transport.peer_links import ARRIVAL_S
from roundelay.transport.simulated_transport import SimulatedTransport

ENDED, OTHER_ADDRESS = "its process ended", "it has come back at another address"


class ConnectedTransport(SimulatedTransport):
    """One learner's connections to its peers.

    Args:
        rank: this learner.
        network: between the learners.
        process: of this learner.
        generation: of the view for which it was made.

    Attributes:
        closed: it takes part no more.
        generation: collectives of different generations never meet.
    """

    network: ElasticNetwork

    def __init__(self, rank: int, network: ElasticNetwork, process: VirtualProcess, generation: int) -> None:
        super().__init__(rank, network)
        self.process, self.generation = process, generation
        self.closed = False
        self._addresses: dict[int, Address] = {}
        self._links: dict[int, ElasticTransport] = {}  # peers with which heartbeats are exchanged
        self._opened: dict[int, int] = {}  # how often connections to a peer were opened anew
        self._connected: dict[ElasticTransport, None] = {}  # peers to which a connection for requests is open
        self._callers: dict[ElasticTransport, None] = {}  # peers that have opened one to us
        # Requests that wait for a connection, by its other end and by how often connections were opened anew.
        self._unsent: dict[tuple[ElasticTransport, int], list[Callable[[], None]]] = {}
        self._known: set[int] = set()
        self._arrivals: list[tuple[set[int], Future[None]]] = []
        self._finished_peers: set[int] = set()
        self._served: list[Future[None]] = []  # calls under way that we answer
        self._heartbeats = Heartbeats(network.clock.now)
        self._healing: Healing | None = None

    @property
    def _whole(self) -> ElasticTransport:
        return cast("ElasticTransport", self)

    # Connections ---------------------------------------------------------------------------------------------------------

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """As `PeerLinks.connect`: to peers of higher rank; the others connect to us."""
        self._addresses = dict(addresses)
        for peer in addresses:
            if peer > self.rank and not self._open(peer):
                raise PeerLostError(peer, "it does not answer")
        lower = {peer for peer in addresses if peer < self.rank}
        arrived: Future[None] = Future()
        self._arrivals.append((lower, arrived))
        self._tell_arrived()
        try:
            waiting.result(arrived, ARRIVAL_S)
        except TimeoutError:
            raise PeerLostError(min(lower - self._known), f"it has not connected within {ARRIVAL_S:g} s") from None

    def join(self, addresses: Mapping[int, Address]) -> None:
        """As `PeerLinks.join`: to all peers, which train already."""
        self._addresses = dict(addresses)
        for peer in addresses:
            if not self._open(peer):
                self.lose(peer, "it does not answer")

    def _open(self, peer: int) -> bool:
        other = waiting.result(
            self.network.handshake(
                self.process, self.rank, self._addresses[peer], lambda other: other.linked(self._whole)
            )
        )
        if other is not None:
            self.linked(other)
        return other is not None

    def linked(self, other: ElasticTransport) -> None:
        """Exchange heartbeats with this peer from now on."""
        if self.closed:
            return
        self._links[other.rank] = other
        self._known.add(other.rank)
        self._heartbeats.heard(other.rank)
        if self._finished is not None:
            self._say(other, lambda: other._peer_finished(self._whole))
        self._tell_arrived()

    def _tell_arrived(self) -> None:
        for wanted, arrived in self._arrivals:
            if wanted <= self._known and not arrived.done():
                arrived.set_result(None)

    def peer(self, rank: int) -> ElasticTransport:
        """The transport at the address of a peer."""
        listener = self.network.listeners[self._addresses[rank]]
        if listener.transport is None:
            raise PeerLostError(rank, "it does not answer")
        return listener.transport

    def call(self, peer: int, call: Call) -> Future[None]:
        """As `SimulatedTransport.call`; the future fails if the peer has opened a port and does not answer there yet."""
        try:
            return super().call(peer, call)
        except PeerLostError as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed

    def send_to(
        self, target: SimulatedTransport, nbytes: int, action: Callable[[], None], *, streamed: bool = False
    ) -> None:
        """A message arrives if neither end has closed the connection meanwhile."""
        target = cast("ElasticTransport", target)
        opened = self._opened.get(target.rank, 0)
        if target in self._callers or target in self._connected:
            self._send(target, action)
        elif (target, opened) in self._unsent:
            self._unsent[target, opened].append(action)
        else:
            self._unsent[target, opened] = [action]
            address = self._addresses[target.rank]
            self.network.handshake(
                self.process, self.rank, address, lambda other: other._callers.update({self._whole: None})
            ).add_done_callback(lambda answered: self._requests_opened(target, opened, answered.result()))

    def _requests_opened(self, target: ElasticTransport, opened: int, answered: ElasticTransport | None) -> None:
        unsent = self._unsent.pop((target, opened), [])
        if self.closed or opened != self._opened.get(target.rank, 0):
            return
        if answered is not target:
            self.lose(target.rank, "its connection broke (it does not answer)")
            return
        self._connected[target] = None
        for action in unsent:
            self._send(target, action)

    def _send(self, other: ElasticTransport, action: Callable[[], None]) -> None:
        opened = self._opened.get(other.rank, 0), other._opened.get(self.rank, 0)

        def arrive() -> None:
            now = self._opened.get(other.rank, 0), other._opened.get(self.rank, 0)
            if not other.closed and opened == now:
                action()

        self.network.travel(self.rank, other.rank, other.process, arrive, self)

    def _say(self, other: ElasticTransport, action: Callable[[], None]) -> None:
        """Send over the connection for heartbeats."""
        self.network.travel(self.rank, other.rank, other.process, action, (self, "heartbeats"))

    def applied(self, exchange: object, difference: Tensor, sign: float) -> None:
        """Tell the observer."""
        self.network.on_applied(self._whole, exchange, difference, sign)

    def serving(self, confirmed: Future[None]) -> None:
        """Remember it."""
        self._served = [*(each for each in self._served if not each.done()), confirmed]

    def alters(self, target: SimulatedTransport) -> bool:
        """Whether a fault alters the message that travels to the target now; only one."""
        link = self.rank, target.rank
        altered = link in self.network.corrupt
        self.network.corrupt.discard(link)
        return altered


class ElasticTransport(ConnectedTransport):
    """The same with heartbeats, healing and an end."""

    def __init__(self, rank: int, network: ElasticNetwork, process: VirtualProcess, generation: int) -> None:
        super().__init__(rank, network, process, generation)
        process.every(BEAT_S, self._beat, first_s=BEAT_S * network._draw.random())
        process.on_end.append(self._process_ended)

    # Heartbeats ----------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        if self.closed:
            raise StopIteration
        for other in list(self._links.values()):
            self._say(other, lambda other=other: other._heard(self))  # type: ignore[misc]
        lost, silent, heard = self._heartbeats.changes()
        for peer in sorted(silent | heard):
            self._tell_silent(peer, silent=peer in silent)
        for peer in lost:
            self._unlink(peer, f"{NO_HEARTBEAT}; it is frozen or cut off")

    def _heard(self, other: ElasticTransport) -> None:
        if self._links.get(other.rank) is other:
            self._heartbeats.heard(other.rank)

    def _unlink(self, peer: int, reason: str) -> None:
        """As the failure detector does: close the connection for heartbeats, and report the peer."""
        if self._links.pop(peer, None) is not None:
            self._heartbeats.forget(peer)
            self._finished_peers.add(peer)
            try:
                self.lose(peer, reason)
            except BaseException as error:
                self.fail(error)

    def _peer_closed(self, other: ElasticTransport, reason: str) -> None:
        if self.closed:
            return
        if self._links.get(other.rank) is other:
            self._unlink(other.rank, reason)
        elif other in self._connected:  # a request found its connection broken
            del self._connected[other]
            self.lose(other.rank, f"its connection broke ({reason})")
        self._callers.pop(other, None)

    def lose(self, peer: int, reason: str) -> None:
        """Fail what depends on the peer, and shut all connections to it down: the peer notices."""
        if peer in self._lost or self.closed:
            return
        link = self._links.pop(peer, None)
        self._heartbeats.forget(peer)
        shut_down = [] if reason == LEFT else self._shut_down(peer)  # what it had begun with us may still end
        others = dict.fromkeys([*shut_down, *([link] if link else [])])
        for other in others:
            self._say(other, lambda other=other: other._peer_closed(self, ENDED))  # type: ignore[misc]
        super().lose(peer, reason)

    def give_up(self, peer: int, reason: str) -> None:
        """As the failure detector does."""
        if link := self._links.get(peer):
            self._say(link, lambda: link._peer_closed(self, f"{GAVE_UP} ({reason})"))

    def _shut_down(self, peer: int) -> list[ElasticTransport]:
        """Close all connections for requests; returns the transports at their other ends."""
        self._opened[peer] = self._opened.get(peer, 0) + 1
        closed = [other for other in self._connected | self._callers if other.rank == peer]
        for other in closed:
            self._connected.pop(other, None)
            self._callers.pop(other, None)
        return closed

    def admit(self, peer: int, address: Address = ("", 0)) -> None:
        """The peer is at this address from now on."""
        self._lost.pop(peer, None)
        self._addresses[peer] = address
        self._reopen(peer)

    def _reopen(self, peer: int) -> None:
        self._shut_down(peer)
        for peers, future in list(self._pending):
            if peer in peers and not future.done():
                future.set_exception(PeerLostError(peer, OTHER_ADDRESS))

    # Healing -------------------------------------------------------------------------------------------------------------

    def keep_reaching(self, wanted: Callable[[], Iterable[int]], report: Callable[[int, bool], None]) -> None:
        """Look for peers that are cut off every `RETRY_S`."""
        self._reachable: set[int] = set()
        self._healing = Healing(self.rank, lambda: self.lost, wanted, self._reach, report)
        self.process.every(RETRY_S, self._look, first_s=RETRY_S)

    def _look(self) -> None:
        if self.closed:
            raise StopIteration
        assert self._healing is not None
        self._healing.look()

    def _reach(self, peer: int) -> bool:
        """Try to connect in the background; a look that comes later finds the peer reached."""
        if peer in self._reachable:
            self._reachable.discard(peer)
            return True

        def reached(answered: Future[ElasticTransport | None]) -> None:
            other = answered.result()
            if other is not None and peer in self._lost and not self.closed:
                self._reached(other)
                self._reachable.add(peer)
                assert self._healing is not None
                self._healing.look()

        address = self._addresses[peer]
        self.network.handshake(self.process, self.rank, address, lambda other: other._reached(self)).add_done_callback(
            reached
        )
        return False

    def _reached(self, other: ElasticTransport) -> None:
        self._lost.pop(other.rank, None)
        self._reopen(other.rank)
        self.linked(other)

    # The end -------------------------------------------------------------------------------------------------------------

    def serve(self, begin: Begin | None) -> None:
        """Answer calls. None waits for the calls under way."""
        super().serve(begin)
        if begin is not None:
            self.network.on_attached(self)
            return
        for confirmed in self._served:
            with contextlib.suppress(PeerLostError, RefusedError):  # the exchange was taken back
                waiting.result(confirmed)

    def use_generation(self, generation: int) -> None:
        """Collectives belong to this generation from now on."""
        self.generation = generation

    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Keep answering until all members have finished."""
        self._final, self._finished, self._finishing_with = final, self.pending(()), members
        for round, peer in list(self._early):
            del self._early[round, peer]
            self._send_swap(peer, round, final)
        for other in self._links.values():
            self._say(other, lambda other=other: other._peer_finished(self))  # type: ignore[misc]
        self._check_finished()
        return self._finished

    def _peer_finished(self, other: ElasticTransport) -> None:
        if self._links.get(other.rank) is other:
            self._finished_peers.add(other.rank)
            self._check_finished()

    def _check_finished(self) -> None:
        others = set(self._finishing_with) - {self.rank} - self._lost.keys() - self._finished_peers
        if self._finished and not self._finished.done() and not others:
            self._finished.set_result(None)

    def close(self, failure: str = "") -> None:
        """Say goodbye to all peers."""
        if not self.closed and self.process.alive:
            self._end(f"{GAVE_UP} ({failure})" if failure else LEFT)

    def _process_ended(self) -> None:
        if not self.closed:
            self._end(ENDED)

    def _end(self, reason: str) -> None:
        self.closed = self.gone = True
        self.left = reason == LEFT
        for other in dict.fromkeys([*self._links.values(), *self._connected, *self._callers]):
            self._say(other, lambda other=other: other._peer_closed(self, reason))  # type: ignore[misc]
        for _, future in self._pending:
            if not future.done():
                future.set_exception(PeerLostError(self.rank, "this learner has closed"))


class ElasticEndpoint:
    """Makes a new transport for every view; see `Endpoint`.

    Args:
        network: between the learners.
        process: of this learner.
        learner: its id.
    """

    def __init__(self, network: ElasticNetwork, process: VirtualProcess, learner: int) -> None:
        self._network, self._process, self._learner = network, process, learner
        self._address: Address | None = None
        self.transport: ElasticTransport | None = None

    def open(self) -> Address:
        """Listen on a new port."""
        self.close()
        self._address = self._network.listen(self._process, self._learner)
        return self._address

    def connect(self, learner: int, view: View, *, joining: bool) -> Transport:
        """Connect to all others of the view."""
        assert self._address is not None
        listener, self._address = self._network.listeners[self._address], None
        transport = ElasticTransport(learner, self._network, self._process, view.membership.generation)
        self.transport = listener.transport = transport
        for accept in listener.waiting:
            accept(transport)
        others = {peer: address for peer, address in view.addresses.items() if peer != learner}
        try:
            transport.join(others) if joining else transport.connect(others)
        except BaseException as error:
            transport.close(f"{type(error).__name__}: {error}")
            raise
        return transport

    def reaches(self, learner: int, peer: int, address: Address) -> bool:
        """Whether the peer answers a handshake."""
        return waiting.result(self._network.handshake(self._process, learner, address)) is not None

    def close(self) -> None:
        """Close a port that was opened and not used."""
        if self._address is not None:
            self._network.listeners[self._address].closed = True
            self._address = None
