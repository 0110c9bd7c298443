"""Requests of learners that wait for a reply."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roundelay.cluster.rendezvous.members import Connection
from roundelay.cluster.rendezvous.messages import Message

# The fields that a request of each kind must have, and how to convert each.
_FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "info": {},
    "budget": {"total": int, "used": list},
    "draw": {"group": int, "index": int, "done": int, "patient": bool},
    "last_step": {"begun": int},
    "stop_boundary": {},
    "barrier": {
        "value": lambda value: value,
        "lost": lambda lost: list(map(int, lost)),
        "generation": int,
        "address": lambda address: (str(address[0]), int(address[1])),
    },
}
KINDS = frozenset(_FIELDS)


@dataclass
class Request:
    """A request, and the connection that its reply goes to.

    Attributes:
        number: the learner's number for this request; the reply repeats it.
        fields: all other fields of the request, converted.
        give_up_at: the time after which the learner does not wait for a reply any more.
    """

    connection: Connection
    learner: int
    kind: str
    number: int
    fields: Message
    give_up_at: float = math.inf

    @classmethod
    def parsed(cls, connection: Connection, learner: int, message: Message) -> Request:
        """Check and convert a message. Raises KeyError, TypeError or ValueError for a missing or wrong field."""
        kind = message["kind"]
        fields = {name: convert(message[name]) for name, convert in _FIELDS.get(kind, {}).items()}
        return cls(connection, learner, kind, int(message["request"]), fields)

    def reply(self, **content: Any) -> None:  # noqa: ANN401
        """Send the reply."""
        self.connection.send({"kind": "reply", "request": self.number} | content)


class PendingRequests:
    """The requests without a reply, oldest first."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        """Keep a request until it has a reply."""
        self._requests.append(request)

    def forget(self, *, connection: Connection | None = None, learner: int | None = None) -> None:
        """Remove the requests that came over `connection`, and those of `learner`."""
        self._requests = [
            each for each in self._requests if each.connection is not connection and each.learner != learner
        ]

    def remove(self, request: Request) -> None:
        """Remove one request, to which the caller replies."""
        self._requests.remove(request)

    def at_barrier(self) -> dict[int, Request]:
        """The requests that wait at the barrier, by learner."""
        return {each.learner: each for each in self._requests if each.kind == "barrier"}

    def answer(self, answer: Callable[[Request], Message | None]) -> None:
        """Reply to every request for which `answer` gives a reply now. One reply may make another possible."""
        replied = True
        while replied:
            replied = False
            for request in list(self._requests):
                content = answer(request)
                if content is not None:
                    replied = True
                    self._requests.remove(request)
                    request.reply(**content)
