"""Membership: which learners are alive, and its generation. A view adds the addresses of the learners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Address = tuple[str, int]


@dataclass(frozen=True)
class Membership:
    """The living learners, by id. Their order is the order of the rows of a mixing matrix.

    Attributes:
        living: ids of the living learners.
        generation: grows with every change.

    >>> Membership.of(4).without(1)
    Membership(living=(0, 2, 3), generation=1)
    """

    living: tuple[int, ...]
    generation: int = 0

    @classmethod
    def of(cls, size: int) -> Membership:
        """Learners 0 .. size-1."""
        return cls(tuple(range(size)))

    @property
    def size(self) -> int:
        """Number of living learners."""
        return len(self.living)

    def position(self, learner: int) -> int:
        """Row of `learner` in a mixing matrix over the living learners. Raises KeyError if it is not alive."""
        return self._positions[learner]

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {learner: position for position, learner in enumerate(self.living)}

    def whole_groups(self, size: int) -> Membership:
        """The learners whose group, of `size` consecutive ids, has lost no member.

        >>> Membership.of(6).without(2).whole_groups(2).living
        (0, 1, 4, 5)
        """
        left = Counter(learner // size for learner in self.living)
        return Membership(tuple(each for each in self.living if left[each // size] == size), self.generation)

    def without(self, learner: int) -> Membership:
        """The next generation, with `learner` removed."""
        return Membership(tuple(other for other in self.living if other != learner), self.generation + 1)


@dataclass(frozen=True)
class View:
    """The membership as the rendezvous announces it.

    Attributes:
        membership: the living learners and the generation.
        addresses: where each of them listens for peers.
        values: what each learner brought to the barrier that formed this view; empty if no barrier formed it.
    """

    membership: Membership
    addresses: dict[int, Address]
    values: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> View:
        """Parse a view from a message of the rendezvous."""
        addresses = {int(learner): (str(host), int(port)) for learner, (host, port) in message["living"].items()}
        values = {int(learner): value for learner, value in message.get("values", {}).items()}
        return cls(Membership(tuple(sorted(addresses)), int(message["generation"])), addresses, values)
