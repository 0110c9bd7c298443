"""How a learner draws from the budget of the run, also while the rendezvous is away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from roundelay.cluster.membership import Membership
from roundelay.cluster.rendezvous.budget import LocalBudget
from roundelay.cluster.rendezvous.messages import Message
from roundelay.errors import RendezvousLostError


class Ask(Protocol):
    """Asks the rendezvous; see `RendezvousSession`."""

    def __call__(self, kind: str, *, repeat: bool = False, **fields: Any) -> Message:  # noqa: ANN401
        """Send a request, and wait for its reply. With `repeat`, it is sent again after a reconnection."""


class BudgetClient:
    """A learner's client of the shared budget. It raises DroppedError if the run goes on without this learner.

    Args:
        ask: asks the rendezvous.
        position: this learner's id, and the membership as far as it knows.

    Attributes:
        known: what this learner knows of the budget, so that it can go on while the rendezvous is away.
        declared: the rendezvous knows it, too. Not after a new registration: the rendezvous may have been restarted.
    """

    def __init__(self, ask: Ask, position: Callable[[], tuple[int, Membership]]) -> None:
        self._ask, self._position = ask, position
        self.known, self.declared = LocalBudget(), False

    def declare(self, total: int, used: Sequence[int]) -> None:
        """Say how large the budget is, and which of its numbers an earlier part of this run has used."""
        if self.known.total is None:
            self.known.total, self.known.used = total, list(used)
        self._declare(repeat=True)

    def _declare(self, *, repeat: bool) -> None:
        if not self.declared and self.known.total is not None:
            self._ask("budget", repeat=repeat, total=self.known.total, used=self.known.used)
            self.declared = True

    def draw(self, group: int, index: int, done: int, *, patient: bool = False) -> int | None:
        """The next number of the budget; None if all are used.

        While the rendezvous is unreachable, this learner draws by its own position; see `LocalBudget.next_own`. If none is
        left for it, a patient learner waits for the rendezvous: numbers of others may be left.

        Args:
            group: the group of learners that draws; all its members get the same numbers.
            index: which draw of the group this is. The same index always gives the same number.
            done: how many draws of the group are part of its weights. If the group is lost, its other numbers are given
                out again.
            patient: if no number is left, wait until one is given back, or until none can be given back any more.
        """
        self.known.group, self.known.done = group, max(done, self.known.done)
        request: dict[str, Any] = {"group": group, "index": index, "done": done, "patient": patient}
        try:
            self._declare(repeat=False)
            number = self._ask("draw", **request)["number"]
        except RendezvousLostError:
            number = self.known.drawn.get(index, self.known.next_own(*self._position()))
            if number is None and patient:
                with contextlib.suppress(RendezvousLostError):
                    number = self._ask("draw", repeat=True, **request)["number"]
        if number is None:
            return None
        self.known.drawn[index] = int(number)
        return int(number)
