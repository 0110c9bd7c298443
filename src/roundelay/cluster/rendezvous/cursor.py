"""The data cursor of a run. The budget is a range of numbers, one per step of a group; each is given out once."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping


class Cursor:
    """Gives out the numbers below `total`, each once, except those in `used`.

    Draw k of a group always gives the same number, whichever member of the group asks and however often.

    >>> cursor = Cursor(total=4, used=[1])
    >>> cursor.draw(0, 0), cursor.draw(1, 0), cursor.draw(0, 0), cursor.draw(1, 1), cursor.draw(0, 1)
    (0, 2, 0, 3, None)

    Numbers that a lost group had drawn but not finished are given out again:

    >>> cursor.done(1, 1)
    >>> cursor.give_back(1)
    [3]
    >>> cursor.draw(0, 1)
    3
    """

    def __init__(self, total: int, used: Iterable[int] = ()) -> None:
        self._used = set(used)  # those from `_next` on count
        self.total, self._next = total, 0
        self._returned: list[int] = []
        self._drawn: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by group, by index
        self._done: defaultdict[int, int] = defaultdict(int)

    def draw(self, group: int, index: int) -> int | None:
        """The number for draw `index` of `group`; None if no number is left at the moment."""
        drawn = self._drawn[group]
        if index not in drawn:
            number = self._advance()
            if number is None:
                return None
            drawn[index] = number
        return drawn[index]

    def done(self, group: int, count: int) -> None:
        """Record that the weights of `group` include the steps of its first `count` draws."""
        self._done[group] = max(self._done[group], count)

    def give_back(self, group: int) -> list[int]:
        """Forget a lost group, and return the numbers that it had drawn but not finished. They will be given out again.

        If the group comes back, its draws are counted from zero.
        """
        done = self._done.pop(group, 0)
        unfinished = [number for index, number in self._drawn.pop(group, {}).items() if index >= done]
        for number in unfinished:
            self._free(number)
        return unfinished

    def hold(self, group: int, drawn: Mapping[int, int], done: int, *, alone: bool) -> None:
        """A learner has these draws of the group, by index: replies may be lost, and it may have taken numbers unasked.

        If the learner is `alone` in its group, what was drawn and did not arrive is given out again.
        """
        known = self._drawn[group]
        lost = [index for index, number in known.items() if alone and drawn.get(index) != number]
        missing = {known.pop(index) for index in lost} - set(drawn.values())
        for index, number in drawn.items():
            known.setdefault(index, number)
        self.use(drawn.values())
        for number in missing:
            self._free(number)
        self.done(group, done)

    def use(self, numbers: Iterable[int]) -> None:
        """These numbers are taken, however that came about."""
        taken = set(numbers)
        self._returned = sorted(set(self._returned) - taken)  # a sorted list is a heap
        self._used.update(number for number in taken if number >= self._next)

    @property
    def outstanding(self) -> bool:
        """Whether any group has drawn a number and not finished it; such a number may be given back."""
        return any(drawn and max(drawn) >= self._done[group] for group, drawn in self._drawn.items())

    @property
    def given(self) -> int:
        """Every number below this one was given out or used."""
        return self._next

    def _free(self, number: int) -> None:
        if any(number in drawn.values() for drawn in self._drawn.values()):
            return  # another group took it while the rendezvous was away
        if number >= self._next:
            self._used.discard(number)
        else:
            heapq.heappush(self._returned, number)

    def _advance(self) -> int | None:
        if self._returned:
            return heapq.heappop(self._returned)
        while self._next in self._used:
            self._used.discard(self._next)
            self._next += 1
        if self._next >= self.total:
            return None
        self._next += 1
        return self._next - 1
