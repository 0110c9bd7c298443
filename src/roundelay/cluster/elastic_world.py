"""Elastic runs: a rendezvous at which learners register, and the world of a learner that has registered there."""

from __future__ import annotations

import logging
import os
import secrets
import time
from types import TracebackType

from roundelay import threads
from roundelay.cluster.endpoint import TcpEndpoint
from roundelay.cluster.environment import LOOPBACK, World, address_towards, host_store
from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.cluster.rendezvous.members import RunSpec
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
from roundelay.cluster.rendezvous.state import RendezvousState
from roundelay.cluster.ticket import Ticket
from roundelay.errors import LaunchError
from roundelay.transport.security import Security

log = logging.getLogger("roundelay")

LEARNER = "ROUNDELAY_LEARNER"  # environment variable: the id of this process
PROCESS = "ROUNDELAY_PROCESS"  # environment variable: the name under which the launcher reports the end of this process
JOINS = (
    "ROUNDELAY_JOINS"  # environment variable: 1 if the run must be under way, because this process was started again
)
FIRST_SAID_S, SAY_EVERY_S, LOOK_EVERY_S = 1.0, 5.0, 0.2


class Rendezvous:
    """The place where the learners of an elastic run find each other. Any process can run it; no learner needs to.

        with Rendezvous(learners=4) as rendezvous:
            ...  # start four processes that call roundelay.join(rendezvous.ticket)

    While learners are missing, it logs which ones are here.

    Args:
        learners: how many learners begin together.
        host: the interface to listen on. Other machines need one that they can reach.
        port: 0 chooses a free one.
        min_learners: with fewer living learners the run stops.
        security: by default a new secret.
        open_collectives: allow Gloo and NCCL, which have no authentication, on an interface other than the loopback.
            `consensus` and all strategies except ADPSGD need them.

    Raises LaunchError if the numbers are wrong, or if the interface or the port cannot be used.
    """

    def __init__(
        self,
        learners: int,
        host: str = LOOPBACK,
        port: int = 0,
        *,
        min_learners: int = 1,
        security: Security | None = None,
        open_collectives: bool = False,
    ) -> None:
        if not 1 <= min_learners <= learners:
            raise LaunchError(f"a run of {learners} learners needs 1 to {learners} as min_learners, got {min_learners}")
        security = security or Security(secrets.token_bytes(32))
        info: Message = {}
        self._store: object = None
        if open_collectives or host == LOOPBACK:
            self._store, info["store"] = host_store(host)
        state = RendezvousState(time.monotonic, info=info)
        self.server = RendezvousServer(open_listener(host, port), security, state)
        self.ticket = Ticket(self.server.address, security.environment(), learners, min_learners, secrets.token_hex(8))
        self._closing = False
        threads.start("missing", self._say_who_is_missing)

    @property
    def address(self) -> Address:
        """Where learners connect to."""
        return self.ticket.address

    def _say_who_is_missing(self) -> None:
        """Log, a few seconds apart, which learners have come, until all have."""
        due = time.monotonic() + FIRST_SAID_S
        while not self._closing and not self.server.formed():
            if time.monotonic() >= due:
                due = time.monotonic() + SAY_EVERY_S
                here = self.server.waiting() or f"0 of {self.ticket.learners} learners have come"
                log.warning("%s; they connect to %s:%d", here, *self.address)
            time.sleep(LOOK_EVERY_S)

    def close(self) -> None:
        """Stop serving. Learners that still train go on without the rendezvous. Idempotent."""
        if not self._closing:
            self._closing = True
            self.server.close()
            self._store = None

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def join(ticket: Ticket | str | None = None, learner: int | None = None) -> World:
    """Take part in an elastic run. Waits until all learners that begin together are here; in a run under way, joins it.

    Args:
        ticket: a ticket, its text, or a file with it; by default the one that ROUNDELAY_TICKET names.
        learner: the id of this learner; by default ROUNDELAY_LEARNER, else the rendezvous chooses.

    Raises LaunchError if there is no ticket or the run cannot be joined, HandshakeError if the secret of the ticket is not the
    run's, RendezvousLostError if the rendezvous cannot be reached.
    """
    found = Ticket.parse(ticket) if isinstance(ticket, str) else ticket or Ticket.from_environment()
    if found is None:
        raise LaunchError("there is no ticket: give join() one, or set ROUNDELAY_TICKET to its text or its file")
    wanted = int(os.environ[LEARNER]) if learner is None and LEARNER in os.environ else learner
    security = Security.from_environment(found.security)
    if security is None:
        raise LaunchError("the ticket has no secret; use the ticket of a Rendezvous")
    client = RendezvousClient(found.address, security)
    try:
        return _registered(client, found, security, wanted)
    except BaseException as error:
        client.close(f"{type(error).__name__}: {error}")
        raise


def _registered(client: RendezvousClient, ticket: Ticket, security: Security, wanted: int | None) -> World:
    host = LOOPBACK if ticket.address[0] == LOOPBACK else address_towards(ticket.address[0])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", ticket.learners if host == LOOPBACK else 1))
    store = client.ask_for_info().get("store")
    endpoint = TcpEndpoint(host, security, local_size, store)
    run = RunSpec(ticket.learners, tuple(range(ticket.learners)), ticket.min_learners, ticket.run)
    joins = os.environ.get(JOINS) == "1"
    view = client.register(run, endpoint.open(), wanted, joins=joins, process=os.environ.get(PROCESS, ""))
    assert client.id is not None
    local_rank = int(os.environ.get("LOCAL_RANK", client.id % local_size))
    log.info("learner %d of %d is here%s", client.id, view.membership.size, ", and joins" if client.joining else "")
    return World(client.id, ticket.learners, local_rank, local_size, client=client, endpoint=endpoint)
