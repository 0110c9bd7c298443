"""The rendezvous on the virtual clock: the real `RendezvousState`, and learners' clients whose connections may break."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future

from roundelay import waiting
from roundelay.clock import VirtualClock
from roundelay.cluster.rendezvous.awaited_replies import AwaitedReplies
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.state import RendezvousState
from roundelay.simulation.elastic_network import RENDEZVOUS, ElasticNetwork
from roundelay.simulation.virtual_threads import VirtualProcess
from roundelay.transport.handshake import HANDSHAKE_S
from roundelay.transport.heartbeats import BEAT_S, NO_HEARTBEAT, Heartbeats
from roundelay.transport.security import Security


class _Connection:
    """Both ends of a connection between a learner and the rendezvous.

    Attributes:
        open: the learner's end has not been closed.
        served: the rendezvous's end has not been closed.
    """

    def __init__(self, rendezvous: SimulatedRendezvous, client: SimulatedConnection) -> None:
        self._rendezvous, self._client = rendezvous, client
        self._server = rendezvous.process
        self.open = self.served = True

    def send(self, message: Message) -> None:
        """The rendezvous sends to the learner."""
        if self.served:
            copy = _copied(message)
            self._to_client(lambda: self._client.received(self, copy))

    def shut_down(self) -> None:
        """The rendezvous ends the connection."""
        if self.served:
            self.served = False
            self._rendezvous.process.call_later(0.0, lambda: self._rendezvous.state.closed(self))
            self._to_client(lambda: self._client.broken(self, "the connection was closed"))

    def ask(self, message: Message) -> None:
        """The learner sends to the rendezvous."""
        if self.open:
            copy = _copied(message)
            self._to_server(lambda: self._rendezvous.handle(self, copy))

    def close(self, *, noticed: bool = True) -> None:
        """The learner ends the connection; the rendezvous may not notice, as when the learner's machine is cut off."""
        if self.open:
            self.open = False
            if noticed:
                self._to_server(lambda: self._rendezvous.closed(self))

    def _to_client(self, action: Callable[[], None]) -> None:
        network, place = self._rendezvous.network, self._client.place
        network.travel(RENDEZVOUS, place, self._client.process, action, self)

    def _to_server(self, action: Callable[[], None]) -> None:
        self._rendezvous.network.travel(self._client.place, RENDEZVOUS, self._server, action, self)


def _copied(message: Message) -> Message:
    """What the other end reads."""
    return message if message["kind"] == "heartbeat" else json.loads(json.dumps(message))


class SimulatedRendezvous:
    """The server of a run. It may die and come back; then it knows only what learners tell it.

    Args:
        clock: on which it lives.
        network: between the learners and the rendezvous.
        on_event: called with every event of the run.

    Attributes:
        state: decides.
        process: of the server; another one after it has come back.
    """

    def __init__(self, clock: VirtualClock, network: ElasticNetwork, on_event: Callable[[Message], None]) -> None:
        self._clock, self.network, self._on_event = clock, network, on_event
        self.start()

    def start(self) -> None:
        """Start the server, with an empty memory."""
        self.process = VirtualProcess(self._clock, "rendezvous")
        self.state = RendezvousState(self._clock.now, self._on_event)
        self._connections: dict[_Connection, None] = {}  # in order: sets have no order that repeats
        self.process.every(BEAT_S, self._beat, first_s=BEAT_S)

    def die(self) -> None:
        """The process of the server ends."""
        connections, self._connections = self._connections, {}
        self.process.end()
        for connection in connections:
            connection.shut_down()

    def connect(self, client: SimulatedConnection) -> Future[_Connection | None]:
        """Open a connection; None if the rendezvous does not answer."""
        opened: Future[_Connection | None] = Future()
        connection, process = _Connection(self, client), self.process

        def settle(result: _Connection | None) -> None:
            if not opened.done():
                opened.set_result(result)

        def accept() -> None:
            self._connections[connection] = None
            self.network.travel(RENDEZVOUS, client.place, client.process, lambda: settle(connection), connection)

        if process.alive:
            self.network.travel(client.place, RENDEZVOUS, process, accept, connection)
        client.process.call_later(HANDSHAKE_S if process.alive else BEAT_S, lambda: settle(None))
        return opened

    def handle(self, connection: _Connection, message: Message) -> None:
        """A message of a learner has come."""
        if connection.served:
            self.state.handle(connection, message)

    def closed(self, connection: _Connection) -> None:
        """A learner has closed its connection."""
        self._connections.pop(connection, None)
        if connection.served:
            connection.served = False
            self.state.closed(connection)

    def _beat(self) -> None:
        self.state.tick()
        for connection in list(self._connections):
            if connection.served:
                connection.send({"kind": "heartbeat"})
            else:
                self._connections.pop(connection, None)


class SimulatedConnection(AwaitedReplies):
    """A learner's end: what `ReconnectingConnection` does in a thread, as events of the process."""

    def __init__(
        self,
        process: VirtualProcess,
        place: int,
        rendezvous: SimulatedRendezvous,
        on_message: Callable[[Message], None],
        on_reconnected: Callable[[], None],
    ) -> None:
        super().__init__(on_message, on_reconnected)
        self.process, self.place, self._rendezvous = process, place, rendezvous
        self._closing = False
        self.connection: _Connection | None = None
        first = waiting.result(rendezvous.connect(self))
        if first is None:
            raise ConnectionRefusedError("the rendezvous does not answer")
        self._use(first)
        process.every(BEAT_S, self._beat, first_s=0.0)
        process.on_end.append(self._process_ended)

    def _process_ended(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def _use(self, connection: _Connection) -> None:
        self.connection = connection
        self._heartbeats = Heartbeats(self.process.clock.now)
        self._heartbeats.heard(RENDEZVOUS)

    def received(self, connection: _Connection, message: Message) -> None:
        """A message has come over this connection."""
        if connection is self.connection and connection.open:
            self._heartbeats.heard(RENDEZVOUS)
            self._received(message)

    def broken(self, connection: _Connection, reason: str, *, noticed: bool = True) -> None:
        """The connection is lost: connect again."""
        if connection is self.connection and connection.open and not self._closing:
            connection.close(noticed=noticed)
            self._lost(ConnectionError(reason), self.process.clock.now())
            self._try()

    def break_unnoticed(self) -> None:
        """The connection breaks, and the rendezvous does not notice."""
        if self.connection is not None:
            self.broken(self.connection, "it broke", noticed=False)

    def _try(self) -> None:
        if not self._closing:
            self._rendezvous.connect(self).add_done_callback(lambda opened: self._reconnect(opened.result()))

    def _reconnect(self, opened: _Connection | None) -> None:
        if opened is None:
            self.process.call_later(BEAT_S, self._try)
        elif self._closing:
            opened.close()
        else:
            self._use(opened)
            self._send_again()
            self._wake()

    def _beat(self) -> None:
        if self._closing:
            raise StopIteration
        if self.connected and self.connection is not None:
            self.connection.ask({"kind": "heartbeat"})
            if self._heartbeats.lost():
                self.broken(self.connection, NO_HEARTBEAT)

    def _wake(self) -> None:
        while self.connection is not None and self.connected and self.process.alive and not self._outbox.empty():
            self.connection.ask(self._outbox.get())

    def close(self, farewell: Message) -> None:
        """Send a last message if the connection stands, and close it."""
        if not self._closing:
            self._closing = True
            self._outbox.put(farewell)
            self._wake()
            self._process_ended()
            self._fail(ConnectionError("this learner has closed its connection to the rendezvous"))


class SimulatedClient(RendezvousClient):
    """A learner's client of the rendezvous; only its connection is another one."""

    def __init__(self, process: VirtualProcess, place: int, rendezvous: SimulatedRendezvous) -> None:
        self._virtual = process, place, rendezvous
        super().__init__(("rendezvous", 0), Security(bytes(32)))

    def _opened(self) -> AwaitedReplies:
        return SimulatedConnection(*self._virtual, self._received, self._reconnected)
