"""Elastic runs: a rendezvous at which learners register, and the world of a learner that has registered there."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from types import TracebackType

from roundelay.cluster.endpoint import TcpEndpoint
from roundelay.cluster.environment import LOOPBACK, World, address_towards, host_store
from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.cluster.rendezvous.formation import sentence
from roundelay.cluster.rendezvous.members import RunSpec
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
from roundelay.cluster.rendezvous.session import RendezvousSession
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
HOST = "ROUNDELAY_HOST"  # environment variable: the interface to listen on; by default the one that leads to the rendezvous
POLL_S = 0.02


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
            `consensus` and all strategies except ADPSGD and LocalSGD need them.
        on_event: called, in the thread of the server, with every event: waiting, died, dropped, left, joined, recovered,
            stopping. By default only missing learners are logged.

    Attributes:
        ticket: what a process must know to take part.
        server: the server.

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
        on_event: Callable[[Message], None] | None = None,
    ) -> None:
        if learners < 1:
            raise LaunchError(f"a run needs at least 1 learner, got {learners}")
        if not 1 <= min_learners <= learners:
            raise LaunchError(f"a run of {learners} learners needs 1 to {learners} as min_learners, got {min_learners}")
        security = security or Security(secrets.token_bytes(32))
        info: Message = {}
        listener = open_listener(host, port)
        self._store: object = None
        if open_collectives or host == LOOPBACK:
            self._store, info["store"] = host_store(host)
        state = RendezvousState(time.monotonic, on_event or self._log_missing, info)
        self.server = RendezvousServer(listener, security, state)
        self.ticket = Ticket(self.server.address, security.environment(), learners, min_learners, secrets.token_hex(8))
        self._closed = False

    @property
    def address(self) -> Address:
        """Where learners connect to."""
        return self.ticket.address

    def died(self, learner: int | None, reason: str, process: str = "") -> None:
        """A process has ended; its learner may not have registered, and then its id may be unknown."""
        self.server.died(learner, reason, process)

    def waiting(self) -> str:
        """Which learners have come, which have not, and where they connect to; empty if none is missing."""
        if self.server.formed():
            return ""
        missing = self.server.waiting() or sentence(self.ticket.learners, ())
        return "waiting at {}:{}: {}".format(*self.address, missing)

    def stop(self, reason: str) -> None:
        """Ask all learners of `roundelay train` to save and stop, and let no other learner join."""
        self.server.stop(reason)

    def _log_missing(self, event: Message) -> None:
        if event["event"] == "waiting":
            log.warning("waiting at %s:%d: %s", *self.address, event["reason"])

    def close(self) -> None:
        """Stop serving. Learners that still train go on without the rendezvous. Idempotent."""
        if not self._closed:
            self._closed = True
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
    return _join(found, wanted_id() if learner is None else learner)


def _join(found: Ticket, wanted: int | None, *, again: bool = False) -> World:
    client = RendezvousClient(found.address, found.credentials())
    run = RunSpec(found.learners, tuple(range(found.learners)), found.min_learners, found.run)
    try:
        return register(client, found, run, wanted, again=again)
    except BaseException as error:
        client.close(f"{type(error).__name__}: {error}")
        raise


def join_next_run() -> World:
    """Begin the next run with all learners of the run that ROUNDELAY_TICKET names; a learner that has finished calls this.

    It waits first until all learners have left. Learners leave one after the other. A learner that came back at once would
    join the old run, and would be missing when the next run begins.
    """
    ticket = Ticket.from_environment()
    assert ticket is not None
    with RendezvousSession(ticket.address, ticket.credentials()) as session:
        while session.ask_for_info()["under_way"]:
            time.sleep(POLL_S)
    return _join(ticket, wanted_id(), again=True)


def wanted_id() -> int | None:
    """The id that the launcher has given to this process; None if the rendezvous is to choose."""
    return int(os.environ[LEARNER]) if LEARNER in os.environ else None


def register(
    client: RendezvousClient,
    ticket: Ticket,
    run: RunSpec,
    wanted: int | None,
    *,
    collectives: bool = True,
    joins: bool = False,
    files: Address | None = None,
    again: bool = False,
) -> World:
    """Register a learner, and wait until all learners that begin together are here.

    Args:
        client: not registered yet.
        ticket: of the run.
        run: the same from every learner.
        wanted: the id; None lets the rendezvous choose.
        collectives: this learner will use Gloo or NCCL if the rendezvous allows them.
        joins: the run must be under way. This is also so if the launcher says that it has started the process again.
        files: where the supervisor serves the files of its directory to other machines.
        again: this process took part in the last run at the rendezvous, and begins the next one.

    Returns the world in which the rank of this learner is its id.
    """
    on_loopback = ticket.address[0] == LOOPBACK
    host = os.environ.get(HOST) or (LOOPBACK if on_loopback else address_towards(ticket.address[0]))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", ticket.learners if host == LOOPBACK else 1))
    store = client.ask_for_info().get("store") if collectives else None
    endpoint = TcpEndpoint(host, ticket.credentials(), local_size, store)
    joins = joins or os.environ.get(JOINS) == "1"
    process = os.environ.get(PROCESS, "")
    view = client.register(run, endpoint.open(), wanted, joins=joins, process=process, files=files, again=again)
    assert client.id is not None
    local_rank = int(os.environ.get("LOCAL_RANK", client.id % local_size))
    log.info("learner %d of %d is here%s", client.id, view.membership.size, ", and joins" if client.joining else "")
    return World(client.id, ticket.learners, local_rank, local_size, client=client, endpoint=endpoint)
