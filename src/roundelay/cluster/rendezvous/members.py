"""The learners that a rendezvous knows: those that live, those that are still joining, and the generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.messages import Message

STARTED_AGAIN = "another process has registered with its id"
NEVER_FORMED = -1  # the generation before all learners that begin together have registered


@dataclass(frozen=True)
class RunSpec:
    """What the rendezvous must know about a run. Every learner sends it with its registration.

    Attributes:
        expected: how many learners begin together.
        stop_groups: for every learner, the number of its stop group. Learners of one stop group end with the same step.
        min_learners: with fewer living learners the run is saved and stopped.
        identity: tells runs apart that use the same rendezvous. A learner of another run is refused.
        about: what a process that wants to join must know, such as the run's directory; plain values.
    """

    expected: int
    stop_groups: tuple[int, ...]
    min_learners: int = 1
    identity: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RunSpec:
        """Parse the specification from a registration."""
        stop_groups = tuple(map(int, message["stop_groups"]))
        expected, least = int(message["expected"]), int(message["min_learners"])
        return cls(expected, stop_groups, least, str(message.get("identity", "")), dict(message.get("about", {})))


class Connection(Protocol):
    """What the rendezvous needs of a connection to a learner; see `MessageConnection`."""

    def send(self, message: Message) -> None:
        """Send a message without blocking."""

    def shut_down(self) -> None:
        """End the connection."""


@dataclass
class Member:
    """One learner.

    Attributes:
        address: where it listens for peers.
        connection: to the learner; None while it is broken.
        away_since: the time at which the connection broke.
        joined_in: the generation in which the learner joined; NEVER_FORMED if it was there from the beginning.
        adopted: the newest generation that the learner has said it trains with.
        process: the name of its process, as the supervisor knows it.
        has_weights: it joins again, and has weights of this run from before it was dropped.
    """

    address: Address
    connection: Connection | None
    away_since: float = 0.0
    joined_in: int = NEVER_FORMED
    adopted: int = NEVER_FORMED
    process: str = ""
    has_weights: bool = False


class Members:
    """The table of learners. It has no clock, and sends only when `send_to_living` is called.

    Args:
        first_generation: the generation in which the run begins. An earlier run at the same rendezvous had smaller ones.
    """

    def __init__(self, first_generation: int = 0) -> None:
        self.generation, self._first_generation = NEVER_FORMED, first_generation
        self.living: dict[int, Member] = {}
        self.joining: dict[int, Member] = {}  # registered in a run that is under way, and not ready for peers yet
        self._learners: dict[Connection, int] = {}
        self._largest_id = -1

    @property
    def formed(self) -> bool:
        """Whether all learners that begin together have registered."""
        return self.generation != NEVER_FORMED

    def form(self) -> None:
        """The learners that live now begin the run."""
        self.generation = self._first_generation

    def learner_in(self, process: str) -> int | None:
        """The living or joining learner in this process."""
        everyone = [*self.living.items(), *self.joining.items()]
        return next((learner for learner, member in everyone if process and member.process == process), None)

    @property
    def initial(self) -> list[int]:
        """The living learners that were there when the run began."""
        return [learner for learner, member in self.living.items() if member.joined_in == NEVER_FORMED]

    @property
    def all_connected(self) -> bool:
        """Whether every living learner has a connection at the moment."""
        return all(member.connection is not None for member in self.living.values())

    def learner_of(self, connection: Connection) -> int | None:
        """The learner that has registered over this connection."""
        return self._learners.get(connection)

    def assign_id(self, wanted: int | None) -> int:
        """The id `wanted`, or the next free one."""
        learner = self._largest_id + 1 if wanted is None else wanted
        self._largest_id = max(self._largest_id, learner)
        return learner

    @property
    def begun(self) -> bool:
        """Whether a living learner trains already."""
        return any(member.adopted != NEVER_FORMED for member in self.living.values())

    @property
    def only_newcomers(self) -> bool:
        """Whether each living learner has joined, and has not said that it trains: none is known to have the run's state."""
        living = self.living.values()
        return all(member.joined_in != NEVER_FORMED and member.adopted == NEVER_FORMED for member in living)

    @property
    def with_weights(self) -> set[int]:
        """Learners from which one that joins can take the weights of this run, now or when they have joined again."""
        return {*self.living, *(learner for learner, member in self.joining.items() if member.has_weights)}

    def attach(self, learner: int, member: Member, *, joining: bool) -> None:
        """Add the learner, or give a known one a new connection."""
        table, connection = self.joining if joining else self.living, member.connection
        assert connection is not None
        earlier = self.joining.pop(learner, None) or self.living.get(learner)
        before = None if earlier is None else earlier.connection
        if before is not None and before is not connection:
            self._learners.pop(before, None)
            before.shut_down()
        table[learner] = member
        self._learners[connection] = learner

    def detach(self, connection: Connection, now: float) -> int | None:
        """Note that a connection broke. A joining learner is forgotten; a living one may come back."""
        learner = self._learners.pop(connection, None)
        if learner in self.joining:
            del self.joining[learner]
        elif learner in self.living:
            self.living[learner].connection, self.living[learner].away_since = None, now
        return learner

    def admit(self, learner: int) -> Member:
        """Count a joining learner among the living."""
        member = self.living[learner] = self.joining.pop(learner)
        return member

    def end_joining(self, learner: int) -> None:
        """End the connection of a joining learner, if there is one; `detach` then forgets the learner."""
        if learner in self.joining and (connection := self.joining[learner].connection) is not None:
            connection.shut_down()

    def remove(self, learner: int) -> None:
        """Forget a living learner, and end its connection."""
        connection = self.living.pop(learner).connection
        if connection is not None:
            self._learners.pop(connection, None)
            connection.shut_down()

    def view(self) -> Message:
        """The generation and the addresses of the living learners, as `View.from_message` reads them."""
        addresses = {str(learner): self.living[learner].address for learner in sorted(self.living)}
        return {"generation": self.generation, "living": addresses}

    def send_to_living(self, message: Message) -> None:
        """Send to every living learner that has a connection."""
        for member in list(self.living.values()):
            if member.connection is not None:
                member.connection.send(message)
