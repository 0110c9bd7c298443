"""Membership: the learners that live, and how often that has changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Membership:
    """The living learners, by id, in the order in which a mixing is laid over them.

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
        """How many live."""
        return len(self.living)

    def position(self, learner: int) -> int:
        """Where in the mixing `learner` stands."""
        return self._positions[learner]

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {learner: position for position, learner in enumerate(self.living)}

    def whole_groups(self, size: int) -> Membership:
        """Those whose group, of `size` consecutive ids, is all there.

        >>> Membership.of(6).without(2).whole_groups(2).living
        (0, 1, 4, 5)
        """
        left = Counter(learner // size for learner in self.living)
        return Membership(tuple(each for each in self.living if left[each // size] == size), self.generation)

    def without(self, learner: int) -> Membership:
        """The next generation, one learner fewer."""
        return Membership(tuple(other for other in self.living if other != learner), self.generation + 1)
