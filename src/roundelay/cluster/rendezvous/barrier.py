"""The barrier of a run: it opens when all living learners wait there, and they form the next generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roundelay.cluster.rendezvous.members import Member, Members
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.requests import PendingRequests, Request


class Barrier:
    """Opens the barrier, or tells learners that wait there for too long which ones have not come.

    Args:
        members: the table of learners.
        requests: the requests that wait, among them those at the barrier.
        drop: called with a learner that others cannot reach, an event and the reason; removes the learner.
    """

    def __init__(self, members: Members, requests: PendingRequests, drop: Callable[[int, str, str], None]) -> None:
        self._members, self._requests, self._drop = members, requests, drop
        self._replied: dict[int, tuple[int, Message]] = {}  # by learner: the number of its last request, and the reply

    def open(self) -> bool:
        """Once all living learners wait at the barrier, form the next generation. Returns whether this happened.

        A learner that another learner cannot reach is dropped first.
        """
        while True:
            waiting, living = self._requests.at_barrier(), self._members.living
            if not waiting or not waiting.keys() >= living.keys():
                return False
            unreachable = _unreachable(waiting, living)
            if not unreachable:
                break
            # Two learners may name each other: drop only the one with the largest id, then look again.
            self._drop(max(unreachable), "dropped", "other learners cannot reach it")
        self._members.generation += 1
        for learner, request in waiting.items():
            living[learner].address = request.fields["address"]
        values = {str(learner): request.fields["value"] for learner, request in waiting.items()}
        reply = {"values": values} | self._members.view()
        for learner, request in waiting.items():
            self._requests.remove(request)
            self._replied[learner] = request.number, reply
            request.reply(**reply)
        return True

    def repeated(self, request: Request) -> bool:
        """Whether this request had its reply already, which was lost with a connection; then the reply is sent again."""
        number, reply = self._replied.get(request.learner, (-1, {}))
        if request.number == number:
            request.reply(**reply)
        return request.number == number

    def forget(self, learner: int) -> None:
        """The learner is gone; another process may come with its id."""
        self._replied.pop(learner, None)

    def give_up(self, now: float) -> None:
        """Tell learners that have waited long enough which learners have not come."""
        waiting = self._requests.at_barrier()
        missing = sorted(self._members.living.keys() - waiting.keys())
        for request in waiting.values():
            if now >= request.give_up_at:
                self._requests.remove(request)
                request.reply(missing=missing)


def _unreachable(waiting: Mapping[int, Request], living: Mapping[int, Member]) -> list[int]:
    """Living learners that another learner reports as lost. A learner that has joined again since does not count."""
    return [
        peer
        for request in waiting.values()
        for peer in request.fields["lost"]
        if peer in living and living[peer].joined_in <= request.fields["generation"]
    ]
