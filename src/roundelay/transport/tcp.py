"""The transport between processes: TCP, and shared memory between learners of one machine.

All waiting happens in threads that are blocked in the kernel. When the failure detector gives a peer up, the sockets of that
peer are shut down, and threads blocked on them wake with an error.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from roundelay import devices
from roundelay.transport import handshake, shared_memory
from roundelay.transport.acceptor import Acceptor
from roundelay.transport.base import Address, Begin, Call, Collectives, Swap, Transport
from roundelay.transport.call_server import CallServer
from roundelay.transport.connections import Connections
from roundelay.transport.failure_detector import Event, FailureDetector
from roundelay.transport.framing import Connection
from roundelay.transport.guarded_collectives import GuardedCollectives
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.liveness import Liveness, settle
from roundelay.transport.peer_links import PeerLinks
from roundelay.transport.receiver import Receiver
from roundelay.transport.requests import Requests
from roundelay.transport.security import Security
from roundelay.transport.swaps import Swaps


class TcpTransport(Transport):
    """One learner among processes on one machine or several.

    Args:
        rank: this learner.
        size: how many there are.
        listener: a listening socket whose address the peers know.
        security: the run's secret, which every connection must prove to know, and its certificate for TLS.
        collectives: sums and broadcasts.
        share_memory: let learners of this machine exchange through shared memory.
        local_size: how many learners this machine has; all of them by default.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        listener: socket.socket,
        security: Security,
        collectives: Collectives,
        *,
        share_memory: bool = True,
        local_size: int | None = None,
    ) -> None:
        super().__init__(rank, size, local_size)
        self._memory = shared_memory.SharedMemory() if share_memory and shared_memory.available() else None
        host = handshake.this_host() if self._memory else bytes(16)  # zeros never match, so no peer maps our memory
        self._closed = False
        self._liveness = Liveness()
        self._collectives = GuardedCollectives(collectives, self._liveness, self.traffic)
        self._connections = Connections(rank, host, security, self._liveness, self.lose)
        self._requests = Requests(self, self._connections, self._memory, host)
        self._swaps = Swaps(functools.partial(self._requests.submit, self._requests.push), self.give_up)
        self._calls = CallServer(self)
        self._receiver = Receiver(self, self._swaps, self._calls)
        self._detector = FailureDetector(self._detected)
        self._links = PeerLinks(rank, self._connections, self._liveness, self._detector)
        self._acceptor = Acceptor(listener, security, self.refused, self._accepted, rank=rank, host=host)

    @property
    def address(self) -> Address:
        """Where peers connect."""
        return self._acceptor.address

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Connect to peers that begin together with us: we connect to those of higher rank, the others to us.

        Raises PeerLostError if a peer does not answer or never connects.
        """
        self._links.connect(addresses)

    def join(self, addresses: Mapping[int, Address]) -> None:
        """Connect to peers that are already training; a peer that does not answer is lost."""
        self._links.join(addresses, self.lose)

    # Exchanges -----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:
        """Shared memory; pinned memory if there is an accelerator."""
        if devices.accelerator() != devices.CPU:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._memory.allocate(nbytes) if self._memory else super().allocate(nbytes)

    def free(self, buffer: Tensor) -> None:
        """Peers that have mapped the buffer keep their mapping; nothing else uses that memory."""
        if self._memory:
            self._memory.free(buffer)

    def call(self, peer: int, call: Call) -> Future[None]:
        """Exchange in a thread of the pool."""
        return self._requests.submit(self._requests.call, peer, call)

    def serve(self, begin: Begin | None) -> None:
        """Answer calls with exchanges from `begin`; None refuses them from now on."""
        self._calls.answer_with(begin)

    def swap(self, swap: Swap) -> Future[None]:
        """Push to every peer of the round; what the peers push is received in the threads of their connections."""
        future = self._liveness.depending_on(tuple(swap.incoming))
        self._swaps.start(swap, future)
        return future

    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Keep answering swaps until every member has finished or is gone."""
        others = set(members) - {self.rank} - set(self.lost)
        future = self._liveness.depending_on(())  # it fails with the transport
        self._swaps.finish(final, others).add_done_callback(lambda ended: settle(future, ended.exception()))
        self._detector.say_finished()
        return future

    # Collectives ---------------------------------------------------------------------------------------------------

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Fails as soon as a member is lost."""
        return self._collectives.all_reduce(values, members)

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Fails as soon as a member is lost."""
        return self._collectives.broadcast(values, source, members)

    def use_generation(self, generation: int) -> None:
        """Form new groups for collectives from now on."""
        self._collectives.use_generation(generation)

    def hopeless(self, members: tuple[int, ...]) -> bool:
        """Whether a collective of these members can never end."""
        return self._liveness.hopeless(members)

    # Peers that come and go ----------------------------------------------------------------------------------------

    def offer(self, state: Callable[[], Tensor]) -> None:
        """Give `state()` to learners that fetch it."""
        self._receiver.offer(state)

    def fetch(self, peer: int) -> Future[Tensor]:
        """What `peer` offers."""
        return self._requests.submit(self._requests.fetch, peer)

    def admit(self, peer: int, address: Address) -> None:
        """`peer` has joined, or come back; it opens the connection for heartbeats."""
        self._liveness.admit(peer)
        self._connections.admit(peer, address)

    @property
    def lost(self) -> dict[int, str]:
        """The peers that are gone, and why."""
        return self._liveness.lost

    def lose(self, peer: int, reason: str) -> None:
        """Fail what depends on `peer`, and wake the threads that are blocked on it."""
        closed = self._closed  # before futures fail: the training thread may close because of that
        if self._liveness.lose(peer, reason):
            self._swaps.peer_finished(peer)
            self._connections.shut_down(peer)
            if not closed:
                self._tell_lost(peer, reason)

    def give_up(self, peer: int, reason: str) -> None:
        """Say goodbye to `peer` over its connection for heartbeats; it then closes its connections to us."""
        self._detector.give_up(peer, reason)

    def keep_reaching(self, wanted: Callable[[], Iterable[int]], report: Callable[[int, bool], None]) -> None:
        """Connect again and again to peers of `wanted()` that are lost, in a thread."""
        self._links.keep_reaching(wanted, report)

    def _detected(self, event: Event, peer: int, reason: str) -> None:
        """In the thread of the failure detector."""
        try:
            if event in (Event.SILENT, Event.HEARD):
                self._tell_silent(peer, silent=event == Event.SILENT)
                return
            self._swaps.peer_finished(peer)
            if event == Event.LEFT:
                if self._liveness.lose(peer, reason, left=True) and not self._closed:
                    self._tell_lost(peer, reason)
            elif event == Event.LOST:
                self.lose(peer, reason)
        except BaseException as error:  # heartbeats must go on
            self.fail(error)

    def _accepted(self, connection: socket.socket, hello: Hello) -> None:
        """In the thread of that connection."""
        if hello.purpose != Purpose.REQUESTS:
            self._links.accepted(connection, hello)
            return
        incoming = Connection(connection, hello, share_memory=self._memory is not None)
        if self._connections.add_incoming(incoming):
            self._receiver.serve(incoming)
            self._connections.remove_incoming(incoming)

    def fail(self, error: BaseException) -> None:
        """Have the training thread raise `error` at its next `check` or wait."""
        self._liveness.fail(error)

    def check(self) -> None:
        """Raise what went wrong in a thread of the transport."""
        self._liveness.check()

    def close(self, failure: str = "") -> None:
        """Refuse calls, say goodbye, close every connection. Calls under way fail at both ends: let them end first."""
        if self._closed:
            return
        self._closed = True
        self._links.close()
        self._liveness.close()
        self._calls.close()
        self._receiver.close()
        self._detector.close(failure)
        self._swaps.close()
        self._acceptor.close()
        self._connections.close(sockets=False)
        self._connections.shut_down()
        self._requests.close()
        self._connections.shut_down()  # also what a last request has opened
        self._acceptor.join()
        self._connections.close()
        self._collectives.close()
        if self._memory:
            self._memory.close()
