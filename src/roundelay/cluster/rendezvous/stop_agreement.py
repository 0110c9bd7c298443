"""How learners that step together agree on their last step."""

from __future__ import annotations

from collections.abc import Iterable


class StopAgreement:
    """All learners of a stop group end with the furthest step that one of them has begun.

    Every learner of the group can finish that step, because none of them has begun a later one.

    Attributes:
        stop_groups: for every learner that began the run, the number of its stop group.
    """

    def __init__(self) -> None:
        self.stop_groups: tuple[int, ...] = ()
        self._begun: dict[int, int] = {}  # steps begun, by learner that was asked to stop

    def begun(self, learner: int, steps: int) -> None:
        """Record how many steps a learner had begun when it was asked to stop."""
        self._begun[learner] = steps

    def not_asked(self, learner: int, living: Iterable[int]) -> list[int]:
        """The living members of the stop group of `learner` that have not told how many steps they have begun."""
        own = self._group(learner)
        return [other for other in living if self._group(other) == own and other not in self._begun]

    def last_step(self, learner: int, living: Iterable[int]) -> int | None:
        """The number of steps with which the stop group of `learner` ends; None until all living ones have replied."""
        own = self._group(learner)
        living = {other for other in living if self._group(other) == own}
        begun = {other: steps for other, steps in self._begun.items() if self._group(other) == own}
        return max(begun.values()) if begun.keys() >= living else None

    def clear(self) -> None:
        """Forget all recorded steps, because learners start a new count after a barrier."""
        self._begun.clear()

    def _group(self, learner: int) -> int:
        """A learner that joined later belongs to the only stop group if there is one, else it stops alone."""
        if learner < len(self.stop_groups):
            return self.stop_groups[learner]
        return 0 if set(self.stop_groups) == {0} else learner
