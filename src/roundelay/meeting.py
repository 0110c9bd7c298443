"""A meeting: all living learners wait at a barrier, compare how far each one is, and agree from where they go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from roundelay.cluster.membership import Membership, View
from roundelay.errors import LaunchError, MembershipChangedError
from roundelay.training_state import check_equal

# What a learner waits for at a barrier: learners that wait for different things must meet again.
PROGRESS, CONNECTED, GATHERED = "progress", "connected", "gathered"


@dataclass(frozen=True)
class Progress:
    """How far a learner is; what it brings to a meeting.

    Attributes:
        ready: its weights belong to this run. They do not if it has just joined.
        first_unconfirmed: the first chunk that it does not know to be used by all learners.
        weight_steps: the number of steps that its weights have seen.
        earlier: its weights belonged to this run until it was dropped; they count if no learner is ready.
        initial: it began with the run and has not trained yet, so its weights can be the first of the run.
        agreement: text that must be equal on all learners.
    """

    ready: bool
    first_unconfirmed: int
    weight_steps: int
    earlier: bool = False
    initial: bool = False
    agreement: str = ""

    def to_value(self) -> dict[str, Any]:
        """What a learner brings to the barrier of a meeting."""
        return {PROGRESS: asdict(self)}


def progress_in(view: View) -> dict[int, Progress]:
    """The progress of each learner, from the view that a meeting has formed."""
    return {learner: Progress(**value) for learner, value in values_in(view, PROGRESS).items()}


def values_in(view: View, kind: str) -> dict[int, Any]:
    """What all learners brought to a barrier of this kind. Raises MembershipChangedError if one waited for another kind."""
    if any(not isinstance(value, dict) or kind not in value for value in view.values.values()):
        raise MembershipChangedError("the other learners wait for something else: all must meet")
    return {learner: value[kind] for learner, value in view.values.items()}


def agreed_progress(own: Progress, all_progress: Mapping[int, Progress]) -> Progress:
    """The chunk at which all learners continue, and how many steps the newest weights have seen.

    Raises StrategyError if modules or strategies differ, LaunchError if no learner has the weights of the run.
    """
    check_equal(own.agreement, {learner: each.agreement for learner, each in all_progress.items()})
    ready = with_weights(all_progress).values()
    if not ready:
        raise LaunchError("no learner is left that has the weights of this run; continue from a checkpoint by --resume")
    return Progress(
        ready=True,
        first_unconfirmed=min(each.first_unconfirmed for each in ready),
        weight_steps=max(each.weight_steps for each in ready),
    )


def with_weights(all_progress: Mapping[int, Progress]) -> dict[int, Progress]:
    """The learners whose weights belong to the run, else those that had such weights until they were dropped.

    Before the first step: those that began with the run.
    """
    ready = {learner: each for learner, each in all_progress.items() if each.ready}
    earlier = {learner: each for learner, each in all_progress.items() if each.earlier}
    return ready or earlier or {learner: each for learner, each in all_progress.items() if each.initial}


def check_groups(learner: int, membership: Membership, group_size: int) -> None:
    """Learners of a super-learner that has lost a member leave. The others meet once more, without them.

    Raises LaunchError if `learner` must leave, MembershipChangedError if it must meet once more.
    """
    living, whole = membership.living, membership.whole_groups(group_size).living
    if learner not in whole:
        raise LaunchError(f"learner {learner} leaves, because its group of {group_size} has lost a member")
    if whole != living:
        raise MembershipChangedError(f"the groups of learners {sorted(set(living) - set(whole))} are not complete")
