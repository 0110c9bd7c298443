"""The budget of a run: as the rendezvous counts it, and as a learner counts it while the rendezvous is unreachable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from roundelay.cluster.membership import Membership
from roundelay.cluster.rendezvous.cursor import Cursor


class SharedBudget:
    """The rendezvous's side: one cursor for all learners."""

    def __init__(self) -> None:
        self._cursor: Cursor | None = None
        self._declared: set[int] = set()
        self._groups: defaultdict[int, set[int]] = defaultdict(set)  # by learner, the groups it has drawn for

    @property
    def declared(self) -> bool:
        """Whether any learner has said how large the budget is. Those of a rendezvous that was restarted say so again."""
        return self._cursor is not None

    def declared_by(self, learners: Iterable[int]) -> bool:
        """Whether all of these learners have said which numbers they have used."""
        return self._declared.issuperset(learners)

    @property
    def given(self) -> int:
        """Every number below this one was given out or used."""
        return self._cursor.given if self._cursor else 0

    def declare(self, learner: int, total: int, used: Sequence[int]) -> None:
        """Set the size and the numbers used earlier. All learners declare the same size; what each has used adds up."""
        self._declared.add(learner)
        if self._cursor is None:
            self._cursor = Cursor(total, used)
        else:
            self._cursor.use(used)

    def received(self, learner: int, group: int, drawn: Mapping[int, int], done: int) -> None:
        """A learner that has connected again says which draws of its group it has, by index, and how many are done.

        What a group of several learners has drawn is kept: another member may have received what this one has not.
        """
        shared = any(group in groups for other, groups in self._groups.items() if other != learner)
        self._groups[learner].add(group)
        if self._cursor is not None:
            self._cursor.hold(group, drawn, done, alone=not shared)

    def draw(self, learner: int, group: int, index: int, done: int) -> tuple[int | None, bool]:
        """The number for draw `index` of `group` (None if none is left), and whether one may still be given back."""
        assert self._cursor is not None
        self._groups[learner].add(group)
        self._cursor.done(group, done)
        return self._cursor.draw(group, index), self._cursor.outstanding

    def give_back(self, learner: int) -> list[int]:
        """The unfinished numbers of a lost learner; they will be given out again."""
        groups = self._groups.pop(learner, set())
        return [number for group in groups for number in self._cursor.give_back(group)] if self._cursor else []


class LocalBudget:
    """A learner's side: what it knows of the budget, so that it can go on while the rendezvous is away.

    Attributes:
        total: size of the budget; None until it is declared.
        used: the numbers that were used before this learner has registered.
        group: for which it draws; None before its first draw.
        drawn: the numbers that it has drawn since then, by index.
        done: how many of these draws are part of its weights, as far as it has said.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self.used: list[int] = []
        self.group: int | None = None
        self.done = 0
        self.drawn: dict[int, int] = {}

    def register_again(self) -> None:
        """Count draws from 0. Those that were not done are given out again."""
        self.used += [number for index, number in self.drawn.items() if index < self.done]
        self.drawn, self.done = {}, 0

    def next_own(self, learner: int, membership: Membership) -> int | None:
        """The next number n with n mod size = this learner's position, after all numbers that it knows to be used.

        Positions differ, so learners with the same view do not draw the same number without the rendezvous.

        >>> budget = LocalBudget()
        >>> budget.total, budget.used = 9, [0, 1]
        >>> budget.next_own(1, Membership.of(2))
        3
        """
        assert self.total is not None
        taken = {*self.used, *self.drawn.values()}
        position = membership.position(learner) if learner in membership.living else 0
        start = max(taken, default=-1) + 1
        own = range(start + (position - start) % membership.size, self.total, membership.size)
        return next((number for number in own if number not in taken), None)
