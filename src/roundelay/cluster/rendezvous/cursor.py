"""The data cursor of a run: numbers that count its budget, each given once."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable


class Cursor:
    """Numbers below `total`, each given once; those that were `used` before are not given again.

    A group's k-th draw has one answer, whichever member asks and however often.

    >>> cursor = Cursor(total=4, used=[1])
    >>> cursor.draw(0, 0), cursor.draw(1, 0), cursor.draw(0, 0), cursor.draw(1, 1), cursor.draw(0, 1)
    (0, 2, 0, 3, None)

    What a group that is gone had drawn and not done goes back to the pool:

    >>> cursor.done(1, 1)
    >>> cursor.give_back(1)
    [3]
    >>> cursor.draw(0, 1)
    3
    """

    def __init__(self, total: int, used: Iterable[int] = ()) -> None:
        self._used = set(used)
        self.total, self._next = total, 0
        self._returned: list[int] = []
        self._drawn: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by group, by index
        self._done: defaultdict[int, int] = defaultdict(int)

    def draw(self, group: int, index: int) -> int | None:
        """What `group` gets as its draw number `index`; None when all is given, until something is given back."""
        drawn = self._drawn[group]
        if index not in drawn:
            number = self._advance()
            if number is None:
                return None
            drawn[index] = number
        return drawn[index]

    def done(self, group: int, count: int) -> None:
        """The first `count` draws of `group` are part of its weights."""
        self._done[group] = max(self._done[group], count)

    def give_back(self, group: int) -> list[int]:
        """`group` is gone: what it had drawn and not done; its next draw is its first again."""
        done = self._done.pop(group, 0)
        unfinished = [number for index, number in self._drawn.pop(group, {}).items() if index >= done]
        for number in unfinished:
            heapq.heappush(self._returned, number)
        return unfinished

    def use(self, numbers: Iterable[int]) -> None:
        """These were used without asking."""
        self._used.update(numbers)

    @property
    def outstanding(self) -> bool:
        """Whether something was drawn that is not done, so that it may come back."""
        return any(drawn and max(drawn) >= self._done[group] for group, drawn in self._drawn.items())

    @property
    def given(self) -> int:
        """All below were given or used."""
        return self._next

    def _advance(self) -> int | None:
        while self._returned:
            number = heapq.heappop(self._returned)
            if number not in self._used:
                return number
        while self._next in self._used:
            self._used.discard(self._next)
            self._next += 1
        if self._next >= self.total:
            return None
        self._next += 1
        return self._next - 1
