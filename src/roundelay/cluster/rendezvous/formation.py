"""How a run begins at a rendezvous: which run it is, which learners have come, and which will never come."""

from __future__ import annotations

from collections.abc import Callable, Collection

from roundelay.cluster.rendezvous.members import RunSpec

SAY_EVERY_S = 5.0  # how often it is said that learners are missing, after the first one has come
# How long learners wait for others after a run with the same identity has finished. They may be learners of that run, which
# an outside engine has started again.
AFTER_FINISHED_S = 300.0


class Formation:
    """What is known of a run before all of its learners have come. It has no clock of its own.

    Args:
        now: the time in seconds.
        after_finished: a run with the same identity has finished here before.
    """

    def __init__(self, now: Callable[[], float], *, after_finished: bool = False) -> None:
        self._now, self._after_finished = now, after_finished
        self._first_came = 0.0
        self.run: RunSpec | None = None
        self._absent: dict[object, str] = {}  # by process or learner: why it never came
        self._said_at: float | None = None
        self.failure = ""  # why the run cannot begin: too many learners will never come

    @property
    def identity(self) -> str:
        """The identity of the run; empty before the first learner has come."""
        return "" if self.run is None else self.run.identity

    def adopt(self, run: RunSpec) -> None:
        """Every learner sends the same specification; the first one counts."""
        if self.run is None:
            self.run, self._first_came = run, self._now()
        self._check()

    def wait_without_limit(self) -> None:
        """A process that took part in the finished run begins the next one, so the others will come."""
        self._after_finished = False

    @property
    def given_up(self) -> bool:
        """Whether learners have waited too long for a run that has finished before."""
        return self._after_finished and self.run is not None and self._now() - self._first_came > AFTER_FINISHED_S

    def give_up(self, came: Collection[int]) -> None:
        """After a while, end the wait of learners that have come after their run has finished."""
        if self.given_up and not self.failure and self.run is not None and not self.complete(came):
            self.failure = (
                f"the run has finished, and only {len(came)} of {self.run.expected} learners have come for another one within "
                f"{AFTER_FINISHED_S:g} s; to train again, start all of them"
            )

    def never_comes(self, name: object, reason: str) -> None:
        """A process has ended before it registered."""
        self._absent[name] = reason
        self._check()

    def comes(self, *names: object) -> None:
        """A learner has registered; it may have been started again after its process had ended."""
        for name in names:
            self._absent.pop(name, None)

    def complete(self, came: Collection[int]) -> bool:
        """Whether no learner is missing any more: each has come, or never will."""
        return self.run is not None and bool(came) and len(came) + len(self._absent) >= self.run.expected

    def _check(self) -> None:
        left = 0 if self.run is None else self.run.expected - len(self._absent)
        if self.run is not None and left < self.run.min_learners and not self.failure:
            self.failure = (
                f"only {left} of {self.run.expected} learners can come, fewer than the {self.run.min_learners} that the run "
                f"needs; the first that ended: {next(iter(self._absent.values()))}"
            )

    def missing(self, came: Collection[int]) -> str:
        """Say which learners have come, at once and every few seconds while some are missing; else empty."""
        if self.run is None or self.complete(came):
            return ""
        now = self._now()
        if self._said_at is not None and now - self._said_at < SAY_EVERY_S:
            return ""
        self._said_at = now
        return sentence(self.run.expected, came)


def sentence(expected: int, came: Collection[int]) -> str:
    """Which learners have come, and which have not.

    >>> sentence(4, [0, 2])
    '2 of 4 learners have come (0, 2); missing: 1, 3'
    >>> sentence(2, [])
    '0 of 2 learners have come; missing: 0, 1'
    """
    here = f" ({', '.join(map(str, sorted(came)))})" if came else ""
    absent = [str(learner) for learner in range(expected) if learner not in came][: max(expected - len(came), 0)]
    return f"{len(came)} of {expected} learners have come{here}; missing: {', '.join(absent)}"
