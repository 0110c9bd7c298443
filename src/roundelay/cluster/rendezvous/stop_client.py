"""How learners that stop agree on their last step and on the name of their last checkpoint."""

from __future__ import annotations

from typing import Any, Protocol

from roundelay.cluster.rendezvous.messages import Message

STOPPING_S = 5.0  # how long a learner that is to stop waits for a rendezvous that is away


class AskInTime(Protocol):
    """Asks the rendezvous; see `RendezvousSession`."""

    def __call__(self, kind: str, patience_s: float, *, repeat: bool = False, **fields: Any) -> Message:  # noqa: ANN401
        """Send a request, and wait for its reply. With `repeat`, it is sent again after a reconnection."""


class StopClient:
    """What a learner that is to stop asks of the rendezvous, through `ask`."""

    def __init__(self, ask: AskInTime) -> None:
        self._ask = ask

    def last_step(self, begun: int) -> int:
        """The number of steps with which this learner's stop group ends, given that this learner has begun `begun`.

        Waits until all of the group have asked. Returns `begun` if the rendezvous is unreachable or has dropped this
        learner.
        """
        return self._number("last_step", begun, begun=begun)

    def boundary(self, default: int) -> int:
        """How far the budget was drawn when the first learner asked this: the name of the checkpoint saved at a stop.

        Returns `default` if the rendezvous is unreachable or has dropped this learner.
        """
        return self._number("stop_boundary", default)

    def _number(self, kind: str, default: int, **fields: int) -> int:
        try:
            return int(self._ask(kind, STOPPING_S, repeat=True, **fields)["number"])
        except ConnectionError:
            return default
